"""Network folders as diffusers lays them out: ``config.json`` and one safetensors file, nothing lenient."""

import inspect
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import ModelMixin
from safetensors import SafetensorError
from safetensors.torch import load_file

from hddm.errors import HddmError, did_you_mean
from hddm.files import read_json

WEIGHTS = "diffusion_pytorch_model.safetensors"

Network = TypeVar("Network", bound=ModelMixin)


def read_network(folder: Path, network_class: type[Network], dtype: torch.dtype) -> Network:
    """The network in ``folder``, in evaluation mode, with its weights cast to ``dtype``.

    Shapes are compared on the meta device, before the network takes memory.

    Raises:
        HddmError: for a missing file, an unknown config key, another class, or any tensor missing,
            left over or of another shape; the message names file and tensors.
    """
    path = folder / "config.json"
    config = read_json(path)
    name = config.get("_class_name")
    if name != network_class.__name__:
        raise HddmError(f"{path}: holds a {name}, not a {network_class.__name__}")
    arguments = {key: value for key, value in config.items() if not key.startswith("_")}
    known = inspect.signature(network_class.__init__).parameters
    for key in arguments:
        if key not in known:
            raise HddmError(f"{path}: {network_class.__name__} has no key {key!r}{did_you_mean(key, known)}")
    weights = _read_weights(folder / WEIGHTS)
    # Modules cost memory even on the meta device; a small file must not ask for a billion of them.
    if isinstance(arguments.get("depth"), int) and arguments["depth"] > len(weights):
        raise HddmError(f"{path}: depth is {arguments['depth']}, and there are {len(weights)} tensors")
    try:
        with torch.device("meta"):
            network: Network = network_class(**arguments)
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise HddmError(f"{path}: no network can be built from it ({error})") from error
    _refuse_difference(network, weights, folder / WEIGHTS)
    for key, value in weights.items():
        if not value.isfinite().all():
            raise HddmError(f"{folder / WEIGHTS}: {key!r} holds NaN or Inf; take the weights anew")
    network.load_state_dict({key: value.to(dtype) for key, value in weights.items()}, assign=True)
    network.eval()
    network.requires_grad_(False)
    return network


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise HddmError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        raise HddmError(f"{path}: cannot be read as safetensors ({error})") from error


def _refuse_difference(network: ModelMixin, weights: dict[str, torch.Tensor], path: Path) -> None:
    expected = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in weights.items()}
    problems = [f"missing {key} {expected[key]}" for key in expected.keys() - found.keys()]
    problems += [f"left over {key} {found[key]}" for key in found.keys() - expected.keys()]
    problems += [
        f"{key} is {found[key]}, not {expected[key]}"
        for key in expected.keys() & found.keys()
        if expected[key] != found[key]
    ]
    if problems:
        raise HddmError(f"{path}: does not fit its config.json: {'; '.join(sorted(problems))}")
