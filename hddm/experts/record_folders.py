"""Folders of experts and routers as their records and tensors are written, and routers as they are read."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hddm.condition_names import TEXT
from hddm.experts.records import (
    EXPERT_FILE,
    FILES,
    FORMAT,
    NULL_FILE,
    ROUTER_FILE,
    ExpertRecord,
    RouterRecord,
)
from hddm.networks.folders import unread_network
from hddm.networks.identity import TextEncoderRecord
from hddm.networks.transformers import RouterTransformer
from hddm.networks.unread import Unread
from hddm.utils.errors import HddmError
from hddm.utils.files import sha256_of, write_json
from hddm.utils.records import WEIGHTS, damage, read_record, refuse_damaged, write_manifest
from hddm.utils.tensors import read_safetensors, refuse_non_finite


def write_records(
    folder: Path,
    record: ExpertRecord,
    nulls: Mapping[str, Tensor],
    weights_sha256: str | None = None,
) -> None:
    """Write the record beside the network in ``folder``, and a manifest of all files.

    The hash of the weights' file is computed unless it is known from writing it.
    """
    if nulls:
        save_file({name: null.contiguous() for name, null in nulls.items()}, folder / NULL_FILE)
    content = record.model_dump(mode="json") | {"format": record.needed_format}
    write_json(folder / EXPERT_FILE, content)

    def sha256(path: Path) -> str:
        if weights_sha256 is not None and path == folder / WEIGHTS:
            return weights_sha256
        return sha256_of(path)

    write_manifest(folder, sha256, read=(EXPERT_FILE, *FILES))


def read_nulls(folder: Path) -> dict[str, Tensor]:
    """Null conditions of an expert folder, by network keyword."""
    path = folder / NULL_FILE
    nulls = read_safetensors(path) if path.exists() else {}
    refuse_non_finite(path, nulls)
    return nulls


def save_router(folder: Path, network: RouterTransformer, record: RouterRecord) -> None:
    """Write a router into an existing empty ``folder``."""
    network.save_pretrained(folder)
    if network.null_text is not None:
        save_file({TEXT: network.null_text.cpu().contiguous()}, folder / NULL_FILE)
    write_json(folder / ROUTER_FILE, record.model_dump(mode="json") | {"format": FORMAT})
    write_manifest(folder, read=(ROUTER_FILE, WEIGHTS, NULL_FILE, "config.json"))


def open_router(folder: Path) -> tuple[Unread[RouterTransformer], RouterRecord]:
    """Read a router folder except for its weights; raises as `open_expert`."""
    record = read_record(folder / ROUTER_FILE, RouterRecord, FORMAT)
    unread = unread_network(folder, {RouterTransformer.__name__: lambda: RouterTransformer})
    config, encoder = unread.network.config, record.text_encoder
    sees = (len(record.classes) or None, None if encoder is None else encoder.width)
    if sees != (config.num_classes, config.text_dim):
        raise HddmError(
            f"{folder}: router.json says num_classes {sees[0]} and text_dim {sees[1]}, and config.json "
            f"{config.num_classes} and {config.text_dim}"
        )
    return unread, record


def read_router(
    folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[RouterTransformer, RouterRecord]:
    """Read a router folder; raises as `open_expert`."""
    unread, record = open_router(folder)
    network = unread.load(dtype)
    refuse_damaged(folder, damage(folder, ROUTER_FILE, (NULL_FILE,)))
    network.record = record
    if record.text_encoder is not None:
        network.null_text = _null_text(folder, record.text_encoder)
    return network, record


def _null_text(folder: Path, encoder: TextEncoderRecord) -> Tensor:
    """Tokens (tokens, width) of the empty prompt in a router's folder."""
    null, shape = read_nulls(folder).get(TEXT), (encoder.tokens, encoder.width)
    if null is None or tuple(null.shape) != shape:
        found = "no tokens" if null is None else f"tokens {tuple(null.shape)}"
        raise HddmError(
            f"{folder / NULL_FILE}: holds {found} of the empty prompt, not {shape}; {RouterRecord.remedy}"
        )
    return null.float()
