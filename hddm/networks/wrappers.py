"""Networks in one call, ``network(x, timestep, **conditions) -> Tensor``, and what holds for all of them."""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from hddm.condition_names import TEXT_MASK
from hddm.networks.families import Family, families, family_of, known_family

Module = TypeVar("Module", bound=nn.Module)

# Conditions that a network can do without.
OPTIONAL_CONDITIONS = frozenset({TEXT_MASK})


def compile_blocks(network: nn.Module, **options: Any) -> None:
    """Let ``torch.compile``, with these ``options``, compile the repeated blocks of ``network``.

    All blocks of a class share one graph, so that the first run takes a fraction of the time that compiling
    the network takes. A network without such blocks, as diffusers' UNet without text, is compiled whole. Of a
    network of no family, the blocks of all families count. With ``dynamic=True`` one graph serves batches of
    any size from 2, and another single samples.
    """
    if options.get("dynamic"):
        # Else sizes that happen to be equal, as of batch and tokens, must stay equal, or it compiles again.
        torch.fx.experimental._config.use_duck_shape = False
    for block in repeated_blocks(network) or [network]:
        block.compile(**options)


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """List the repeated blocks of ``network``, outer ones first; of no family, those of all families."""
    own = family_behind(network)
    known = families().values() if own is None else [own]
    repeated = set[str]()
    for family in known:
        repeated.update(family.blocks)
    return [module for module in network.modules() if type(module).__name__ in repeated]


def without_weights(network: Module) -> Module:
    """Copy ``network`` without its weights: they, and buffers that are saved, are on the device meta."""
    held = network.state_dict()
    owned: list[Tensor] = list(network.parameters())
    for name, buffer in network.named_buffers():
        if name in held:
            owned.append(buffer)
    # A copy that stands where its weights would be: whoever places weights must not touch this network.
    memo = {id(one): type(one)(torch.empty_like(one, device="meta")) for one in owned}
    return copy.deepcopy(network, memo).requires_grad_(False)


class NetworkWrapper(nn.Module):
    """A network of a known family that returns a tensor of its input's shape.

    Its sign is turned where it gives the ``negated`` prediction.
    """

    def __init__(self, model: ModelMixin, negated: bool = False) -> None:
        super().__init__()
        self._sign = -1 if negated else 1
        self.model, self._family = model, known_family(model)
        self._has_variance_head = self._family.has_variance_head(model.config)

    @property
    def config(self) -> object:
        return self.model.config

    def forward(self, x: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        """The prediction (batch, C, H, W) for states ``x`` of that shape, without a variance half.

        ``timestep`` is (batch,); ``conditions`` are the interface's, including those that diffusers nests in
        ``added_cond_kwargs``.
        """
        given = dict(conditions)
        for name in self._family.multiplied:
            # Sizes are embedded in float32, as times are.
            if name in given:
                given[name] = given[name].to(x.dtype)
        output = self.full_output(x, timestep, given)[:, : x.shape[1]]
        return output if self._sign == 1 else -output

    def full_output(self, x: Tensor, timestep: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        """The output with any variance half, for ``conditions`` as they are."""
        return self._family.full_output(
            self.model, self._has_variance_head, x, timestep, conditions
        )


def missing_from(given: Collection[str], declared: Sequence[str]) -> list[str]:
    """Conditions that the network needs beside the ``given`` ones."""
    return [name for name in declared if name not in given and name not in OPTIONAL_CONDITIONS]


def family_behind(network: object) -> Family | None:
    """The family of an expert's network, wrapped or not; None for a program or any other callable."""
    # A network whose weights are elsewhere holds the one that it stands for.
    inner = getattr(network, "network", network)
    return family_of(inner.model if isinstance(inner, NetworkWrapper) else inner)


def text_width(network: object) -> int | None:
    """Width of the text tokens that a network takes; None without text, and for a network of no family."""
    family = family_behind(network)
    return None if family is None else family.text_width(getattr(network, "config", {}))


def declared_shape(network: object) -> tuple[int, ...] | None:
    """Shape (C, H, W) of a sample by the config of a network, None where that has none."""
    config = getattr(network, "config", None)
    side, channels = getattr(config, "sample_size", None), getattr(config, "in_channels", None)
    if side is None or channels is None:
        return None
    height, width = (side, side) if isinstance(side, int) else side
    return (channels, height, width)
