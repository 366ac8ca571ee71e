"""The condition of every image of several shards, for a router that sees it (`conditions_of`)."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hddm.condition_names import LABELS, TEXT
from hddm.data.shards import Shard, TokenStore, joined_rows
from hddm.networks.identity import TextEncoderRecord
from hddm.training.settings import RouterConditionName
from hddm.utils.errors import HddmError
from hddm.utils.tensors import append_dims


@dataclass(frozen=True)
class ShardConditions:
    """Class labels, or tokens of captions, of all images of several shards, one after the other.

    ``null`` is the value of no condition, without a batch dimension.
    """

    name: str
    null: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()
    texts: TokenStore | None = None
    text_encoder: TextEncoderRecord | None = None

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Conditions (n, …) of images ``rows`` (n,), by the router's keyword."""
        if self.texts is not None:
            return {self.name: self.texts.take(rows)}
        assert self.labels is not None
        return {self.name: self.labels[rows]}

    def dropped(self, given: Mapping[str, Tensor], where: Tensor) -> dict[str, Tensor]:
        """Conditions ``given`` (n, …), with the null condition ``where`` (n,) is true."""
        value = given[self.name]
        return {
            self.name: torch.where(append_dims(where, value.ndim), self.null.to(value.dtype), value)
        }

    def nulls(self, num: int) -> dict[str, Tensor]:
        """The null condition of ``num`` images."""
        return {self.name: self.null.expand(num, *self.null.shape)}

    def class_shares(self, shards: Tensor, num_shards: int) -> Tensor | None:
        """p(k | class) (classes, K) by counts of images of ``shards`` (N,); None for captions.

        A class without images has p(k).
        """
        if self.labels is None:
            return None
        counts = torch.zeros(len(self.classes) + 1, num_shards, dtype=torch.float64)
        ones = torch.ones(len(shards), dtype=torch.float64)
        counts.index_put_((self.labels, shards), ones, accumulate=True)
        counts = torch.where(counts.sum(1, keepdim=True) > 0, counts, counts.sum(0))
        return counts / counts.sum(1, keepdim=True)


def conditions_of(
    shards: Sequence[Shard], name: RouterConditionName, classes: tuple[str, ...] = ()
) -> ShardConditions:
    """Join the classes of ``shards`` by name, or their captions.

    Args:
        shards: in the order of the router's outputs.
        name: ``class`` or ``text``.
        classes: in place of those of the shards; images of others have no class.

    Raises:
        HddmError: for a shard without labels or captions, and for several text encoders.
    """
    if name == "class":
        return _classes_of(shards, classes)
    return _texts_of(shards)


def _classes_of(shards: Sequence[Shard], classes: tuple[str, ...]) -> ShardConditions:
    lists = [shard.classes for shard in shards]
    names = classes or tuple(dict.fromkeys(itertools.chain.from_iterable(lists)))
    number = {one: k for k, one in enumerate(names)}
    labels = []
    for shard in shards:
        if shard.labels is None or not shard.classes:
            raise HddmError(
                f"{shard.folder}: its images carry no labels; drop `condition` class, or partition images in "
                "class folders"
            )
        table = torch.tensor([number.get(one, len(names)) for one in shard.classes])
        labels.append(table[shard.labels])
    return ShardConditions(LABELS, torch.tensor(len(names)), torch.cat(labels), names)


def _texts_of(shards: Sequence[Shard]) -> ShardConditions:
    texts: list[TokenStore] = []
    first = shards[0]
    for shard in shards:
        if shard.texts is None:
            raise HddmError(
                f"{shard.folder}: holds no text embeddings; hddm encode makes them, or drop `condition` text"
            )
        if shard.text_encoder != first.text_encoder:
            raise HddmError(
                f"{shard.folder}: its captions were encoded by another text encoder than those of "
                f"{first.folder}; encode both by one"
            )
        texts.append(shard.texts)
    store = TokenStore(joined_rows([one.tokens for one in texts]), texts[0].null)
    return ShardConditions(TEXT, store.null, texts=store, text_encoder=first.text_encoder)
