"""Network folders as diffusers lays them out: ``config.json`` and one safetensors file, nothing lenient."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import ModelMixin
from torch import Tensor

from hddm.errors import HddmError
from hddm.files import read_json
from hddm.network_configs import differences, empty_network, fill, parse_config
from hddm.weight_files import read_safetensors

WEIGHTS = "diffusion_pytorch_model.safetensors"

Network = TypeVar("Network", bound=ModelMixin)


def read_network(folder: Path, classes: Sequence[type[Network]], dtype: torch.dtype) -> Network:
    """The network in ``folder``, in evaluation mode, with its weights cast to ``dtype``.

    Shapes are compared on the meta device, before the network takes memory.

    Raises:
        HddmError: for a missing file, an unknown config key, another class, or any tensor missing,
            left over or of another shape; the message names file and tensors.
    """
    network, weights, arguments = open_network(folder, classes)
    for key, value in weights.items():
        if not value.isfinite().all():
            raise HddmError(f"{folder / WEIGHTS}: {key!r} holds NaN or Inf; take the weights anew")
    cast = {key: value.to(dtype) for key, value in weights.items()}
    fill(network, cast, arguments, str(folder / "config.json"))
    return network


def open_network(
    folder: Path, classes: Sequence[type[Network]]
) -> tuple[Network, dict[str, Tensor], dict[str, object]]:
    """The empty network in ``folder``, its tensors as they lie on disk, mapped, and its config.

    Raises:
        HddmError: as `read_network`, but for NaN and Inf.
    """
    path = folder / "config.json"
    kind, arguments = parse_config(read_json(path), classes, str(path))
    weights = read_safetensors(folder / WEIGHTS)
    network = empty_network(kind, arguments, len(weights), str(path))
    problems = differences(network.state_dict(), weights)
    if problems:
        raise HddmError(f"{folder / WEIGHTS}: does not fit its config.json: {'; '.join(problems)}")
    return network, weights, arguments
