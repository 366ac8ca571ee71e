"""Network folders as diffusers lays them out: ``config.json`` and one safetensors file, nothing lenient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from diffusers import ModelMixin
from torch import Tensor

from hddm.errors import HddmError
from hddm.files import read_json, sha256_of
from hddm.network_configs import Classes, differences, empty_network, fill, parse_config
from hddm.weight_files import read_header, read_safetensors, refuse_non_finite

WEIGHTS = "diffusion_pytorch_model.safetensors"

Network = TypeVar("Network", bound=ModelMixin)


@dataclass(frozen=True)
class Unread(Generic[Network]):
    """A network in evaluation mode whose weights are still on disk: on the meta device, but for positions.

    ``read(dtype)`` gives its tensors by name, cast; those of that dtype stay mapped from the file.
    """

    network: Network
    read: Callable[[torch.dtype], dict[str, Tensor]]

    def load(self, dtype: torch.dtype) -> Network:
        """The network with its weights, cast to ``dtype``."""
        self.network.load_state_dict(self.read(dtype), assign=True)
        self.network.requires_grad_(False)
        return self.network


def read_network(folder: Path, classes: Classes[Network], dtype: torch.dtype) -> Network:
    """The network in ``folder``, in evaluation mode, with its weights cast to ``dtype``.

    Shapes are compared on the meta device, before the network takes memory.

    Raises:
        HddmError: for a missing file, an unknown config key, another class, or any tensor missing,
            left over or of another shape; the message names file and tensors.
    """
    return unread_network(folder, classes).load(dtype)


def open_network(
    folder: Path, classes: Classes[Network]
) -> tuple[Network, dict[str, Tensor], dict[str, object]]:
    """The empty network in ``folder``, its tensors as they lie on disk, mapped, and its config.

    Raises:
        HddmError: as `read_network`, but for NaN and Inf.
    """
    path = folder / "config.json"
    kind, arguments = parse_config(read_json(path), classes, str(path))
    weights = read_safetensors(folder / WEIGHTS)
    return fitting(kind, arguments, weights, folder / WEIGHTS, str(path)), weights, arguments


def unread_network(folder: Path, classes: Classes[Network], weights: Path | None = None) -> Unread[Network]:
    """As `read_network`, with the weights left where they are: in ``folder``, or in the file ``weights``.

    Raises:
        HddmError: as `read_network`; for NaN and Inf when they are read.
    """
    path = folder / "config.json"
    kind, arguments = parse_config(read_json(path), classes, str(path))
    return unread(kind, arguments, weights or folder / WEIGHTS, str(path))


def unread(kind: type[Network], arguments: Mapping[str, Any], weights: Path, origin: str) -> Unread[Network]:
    """A network of ``kind`` for the weights in a file; ``origin`` says where its arguments are from.

    Raises:
        HddmError: as `open_network`.
    """
    header, _ = read_header(weights)
    empty = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in header.items()}
    network = fitting(kind, arguments, empty, weights, origin)
    fill(network, empty, arguments, origin)
    return Unread(network, WeightsFile(weights))


def fitting(
    kind: type[Network], arguments: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path, origin: str
) -> Network:
    """The empty network for ``weights`` of the file ``path``; ``origin`` says where its arguments are from.

    Raises:
        HddmError: with every tensor that does not fit.
    """
    network = empty_network(kind, arguments, len(weights), origin)
    problems = differences(network.state_dict(), weights)
    if problems:
        raise HddmError(f"{path}: does not fit its {Path(origin).name}: {'; '.join(problems)}")
    return network


class WeightsFile:
    """Reads a file of weights; the first time it looks for NaN and Inf.

    Raises:
        HddmError: when it is read, for a file that is not what it was when this was made.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._identity = path, _identity(path)
        self._is_checked = False

    def __call__(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every tensor in ``dtype``."""
        return cast(self.stored(), dtype)

    def stored(self) -> dict[str, Tensor]:
        """Every tensor as it is, mapped."""
        # Folders are replaced as a whole: another expert's weights may be where these were.
        if not self._path.exists() or _identity(self._path) != self._identity:
            raise HddmError(f"{self._path}: has changed since it was opened; load the model again")
        weights = read_safetensors(self._path)
        if not self._is_checked:
            refuse_non_finite(self._path, weights)
            self._is_checked = True
        return weights


def cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """``weights`` in ``dtype``; those of another one share a block of memory, given back as a whole."""
    others = {key: value for key, value in weights.items() if value.dtype != dtype}
    align = 64 // torch.empty(0, dtype=dtype).element_size()
    places, total = {}, 0
    for key, value in others.items():
        places[key] = total
        total += -(-value.numel() // align) * align
    block = torch.empty(total, dtype=dtype)
    for key, value in others.items():
        place = block[places[key] : places[key] + value.numel()].view(value.shape)
        others[key] = place.copy_(value)
    return {**weights, **others}


def sha256_once(path: Path) -> str:
    """The SHA-256 of a file, computed again only when it is another file than before, by whatever name."""
    identity = _identity(path)
    if identity not in _HASHES:
        _HASHES[identity] = sha256_of(path)
    return _HASHES[identity]


_HASHES: dict[tuple[int, ...], str] = {}


def _identity(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
