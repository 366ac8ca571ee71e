"""Network folders in diffusers' format, ``config.json`` and one safetensors file, read strictly.

Configs are untrusted: they choose code only from a given list of classes, and the sizes that they declare are
checked against the file's tensors before anything takes memory.
"""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModelMixin
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hddm.networks.families import Family, families, family_of, known_family
from hddm.networks.families.former import renamed
from hddm.networks.families.installed import may_be_added
from hddm.networks.unread import Network, Unread
from hddm.utils.errors import HddmError, an, did_you_mean, one_line, shown
from hddm.utils.files import identity_of, read_json
from hddm.utils.records import WEIGHTS
from hddm.utils.tensors import read_header, read_safetensors, refuse_non_finite

Classes = Mapping[str, Callable[[], type[Network]]]
"""Classes that a config may name, by their names; diffusers' own take seconds to import."""


# Written by diffusers beside the constructor's arguments. None of them is read.
_RECORDS = {"_class_name", "_diffusers_version", "_name_or_path"}


def of_diffusers(*names: str) -> Classes[ModelMixin]:
    """Classes of diffusers by name."""
    return {name: functools.partial(getattr, diffusers, name) for name in names}


def of_families(chosen: Iterable[Family]) -> Classes[ModelMixin]:
    """Classes of families."""
    return {family.name: functools.partial(getattr, family, "network") for family in chosen}


def of_experts() -> Classes[ModelMixin]:
    """Classes of the networks that an expert may have."""
    return of_families(families().values())


def parse_config(
    config: Mapping[str, Any], classes: Classes[Network], origin: str
) -> tuple[type[Network], dict[str, Any]]:
    """The class that ``config`` names and its arguments.

    A former name of a class becomes its present one (`hddm.networks.families.former`). Raises `HddmError` for
    a class outside ``classes`` and for keys that the class does not know, such as ``auto_map``.
    """
    present = renamed(config, origin)
    name = present.get("_class_name")
    known = " or ".join(map(an, classes))
    if name is None:
        raise HddmError(f"{origin}: names no class (_class_name), of {known}; fetch it again")
    if not isinstance(name, str) or name not in classes:
        # Packages add classes of experts, and none of VAEs or routers.
        remedy = f"; {may_be_added()}" if families().keys() & classes.keys() else ""
        raise HddmError(f"{origin}: holds {an(one_line(name, 60))}, not {known}{remedy}")
    kind = classes[name]()
    parameters = inspect.signature(kind.__init__).parameters
    arguments = {key: value for key, value in present.items() if key not in _RECORDS}
    for key in arguments:
        if key not in parameters or key == "self":
            raise HddmError(f"{origin}: {name} has no key {key!r}{did_you_mean(key, parameters)}")
    return kind, arguments


class _Unfilled(TorchFunctionMode):
    """Leave tensors on the meta device as they are: filling what has no values takes half of the time."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func in _FILLS:
            tensor = (*args, *named.values())[0]
            if tensor.is_meta:
                return tensor
        return func(*args, **named)


_FILLS = {Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_}
_FILLS |= {nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_, nn.init.constant_}


def empty_network(
    kind: type[Network], arguments: Mapping[str, Any], num_tensors: int, origin: str
) -> Network:
    """Build the network on the meta device: shapes without memory.

    Raises `HddmError` where the arguments build nothing, or have more layers than the tensors can fill, or
    for blocks with constants that no file holds.
    """
    # Modules cost time and memory even on the meta device; a small file must not create a billion of them.
    layers = 1
    for keys in _depths(kind):
        layers *= max(_largest(arguments.get(key)) for key in keys)
    if layers > (most := min(num_tensors, _MOST_LAYERS)):
        text = f"and its {num_tensors} tensors are enough for {most}"
        remedy = "fetch it again, or correct its config if it has one"
        raise HddmError(f"{origin}: its depth is {layers}, {text}; {remedy}")
    for key, value in arguments.items():
        if isinstance(value, Sequence) and len(value) > _MOST_LAYERS:
            raise HddmError(f"{origin}: {key} has {len(value)} entries, of {_MOST_LAYERS} at most")
    family = family_of(kind)
    try:
        with _Unfilled(), torch.device("meta"):
            made: Any = kind(**arguments) if family is None else family.build(arguments)
            network: Network = made
    except Exception as error:  # a constructor may raise anything for foreign values
        raise HddmError(
            f"{origin}: no network can be built from it ({one_line(error, 300)})"
        ) from error
    if family is not None:
        family.complete(network)
    computed = family.computed if family else ()
    for name, _ in network.named_buffers():
        if name not in (*computed, *network.state_dict()):
            owner = name.rpartition(".")[0]
            block = type(network.get_submodule(owner)).__name__
            text = "whose constants are in no file; such blocks are not supported"
            raise HddmError(f"{origin}: {owner or 'its network'} is {an(block)}, {text}")
    return network


# Of networks that are no expert's: VAEs, text encoders and routers.
_DEPTHS = (
    ("depth", "num_layers"),
    ("layers_per_block",),
    ("down_block_types", "up_block_types"),
    ("num_encoder_blocks", "num_decoder_blocks"),
)
# Bounds, not counts: a layer has a tensor at least. Stable Diffusion XL has 60, where a list has its largest.
_MOST_LAYERS = 256


def _depths(kind: type) -> Sequence[Sequence[str]]:
    """Keys that a constructor multiplies to a number of modules, the largest of each group.

    Every other number makes a tensor larger or nothing at all.
    """
    family = family_of(kind)
    return _DEPTHS if family is None else family.depths


def _largest(value: Any, levels: int = 3) -> int:
    """Largest number of layers that one config entry creates."""
    if isinstance(value, Sequence) and not isinstance(value, str) and levels:
        largest = len(value)
        for inner in value:
            largest = max(largest, _largest(inner, levels - 1))
        return largest
    return min(max(value, 1), 10**12) if isinstance(value, int) else 1


# Attention in diffusers before 0.15.
_ATTENTION = {
    ".to_q.": ".query.",
    ".to_k.": ".key.",
    ".to_v.": ".value.",
    ".to_out.0.": ".proj_attn.",
}


def stored_names(names: Iterable[str], stored: Collection[str]) -> dict[str, str]:
    """Map each of a network's ``names`` to its name in a file: a former one if only that is ``stored``."""
    found = {}
    for name in names:
        former = _former_name(name)
        is_former = name not in stored and former in stored
        found[name] = former if is_former else name
    return found


def _former_name(name: str) -> str:
    for new, old in _ATTENTION.items():
        if new in name:
            return name.replace(new, old)
    return name


def misfits(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Describe every tensor that is missing, left over, of another shape or of integers."""
    problems = []
    for key in expected.keys() - found.keys():
        problems.append(f"missing {key} {tuple(expected[key].shape)}")
    for key in found.keys() - expected.keys():
        problems.append(f"left over {key} {tuple(found[key].shape)}")
    for key in expected.keys() & found.keys():
        wanted, given = expected[key], found[key]
        if wanted.shape != given.shape:
            problems.append(f"{key} is {tuple(given.shape)}, not {tuple(wanted.shape)}")
        if wanted.is_floating_point() and not given.is_floating_point():
            problems.append(f"{key} is of {given.dtype}")
    return sorted(problems)


def fill(
    network: Network, weights: Mapping[str, Tensor], arguments: Mapping[str, Any], origin: str
) -> None:
    """Fill an `empty_network` with its tensors, and compute positions that no file holds.

    Raises `HddmError` for positions that are much larger than the weights.
    """
    network.load_state_dict(dict(weights), assign=True)
    family, buffers = family_of(network), dict(network.named_buffers())
    for name in family.computed if family else ():
        # Some networks of a class have them in their files.
        if name in buffers and buffers[name].is_meta and name not in weights:
            _compute(network, name, buffers[name], weights, arguments, origin)
    network.eval()
    network.requires_grad_(False)


def _compute(
    network: Network,
    name: str,
    buffer: Tensor,
    weights: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    origin: str,
) -> None:
    """Compute a buffer that no file holds, as the network's family does."""
    size = sum(tensor.numel() for tensor in weights.values())
    if buffer.numel() > 16 * size + 2**20:
        raise HddmError(f"{origin}: asks for {buffer.numel()} positions beside {size} weights")
    computed = known_family(network).buffer(name, arguments)
    owner, _, leaf = name.rpartition(".")
    network.get_submodule(owner).register_buffer(leaf, computed, persistent=False)


def open_network(folder: Path) -> tuple[ModelMixin, dict[str, Tensor], dict[str, object]]:
    """The empty network of an expert in ``folder``, its mapped tensors and its arguments.

    Raises `HddmError` as `unread_network`, but not for NaN and Inf.
    """
    kind, arguments, path = _stated(folder, of_experts())
    weights = read_safetensors(folder / WEIGHTS)
    return fitting(kind, arguments, weights, folder / WEIGHTS, str(path)), weights, arguments


def unread_network(
    folder: Path, classes: Classes[Network], weights: Path | None = None
) -> Unread[Network]:
    """The network in ``folder``, with its weights left there or in the file ``weights``.

    Shapes are compared on the meta device, before the network takes memory. Raises `HddmError` for a missing
    file, an unknown config key, another class, or a tensor that is missing, left over or of another shape;
    reading the weights raises it for NaN and Inf.
    """
    kind, arguments, path = _stated(folder, classes)
    return unread(kind, arguments, weights or folder / WEIGHTS, str(path))


def _stated(folder: Path, classes: Classes[Network]) -> tuple[type[Network], dict[str, Any], Path]:
    """The class and the arguments that a network's folder states, and its config."""
    path = folder / "config.json"
    kind, arguments = parse_config(read_json(path), classes, str(path))
    family = family_of(kind)
    if family is not None:
        arguments |= family.parts_in(folder)
    return kind, arguments, path


def write_config(network: ModelMixin, folder: Path) -> None:
    """Write the config of a network, and files that belong to it, but no weights."""
    network.save_config(folder)
    family = family_of(network)
    if family is not None:
        family.write_parts(network, folder)


def unread(
    kind: type[Network], arguments: Mapping[str, Any], weights: Path, origin: str
) -> Unread[Network]:
    """A network of ``kind`` for a weights file; raises as `open_network`."""
    empty = {}
    for name, info in read_header(weights)[0].items():
        empty[name] = torch.empty(info.shape, dtype=info.dtype, device="meta")
    network = fitting(kind, arguments, empty, weights, origin)
    fill(network, empty, arguments, origin)
    return Unread(network, WeightsReader(weights))


def fitting(
    kind: type[Network],
    arguments: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    path: Path,
    origin: str,
) -> Network:
    """The empty network for ``weights`` of file ``path``; `HddmError` lists all that does not fit."""
    network = empty_network(kind, arguments, len(weights), origin)
    refuse_other_tensors(network.state_dict(), weights, path, Path(origin).name)
    return network


def refuse_other_tensors(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    path: Path,
    config: str = "config.json",
) -> None:
    """Raise an `HddmError` that lists all `misfits` of the file ``path``, if any, or says it is quantised."""
    problems = misfits(expected, found)
    if problems:
        refuse_quantised(found, path)
        raise HddmError(f"{path}: does not fit its {config}: {'; '.join(shown(problems))}")


_UNQUANTISED = "which hddm does not read; use the version in float16 or float32"
# What bitsandbytes, ComfyUI, GPTQ, nunchaku and quanto call the scales, tables and numbers of a layer.
_QUANTISED = re.compile(
    r"(?:^|.*\.)(?:SCB|weight_format|absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..+|"
    r"scaled_fp8|comfy_quant|weight_scale|weight_scale_2|scale_weight|scale_input|input_scale|output_scale|"
    r"qweight|qzeros|g_idx|wscales|wzeros|_data|_scale)"
)


def refuse_quantised(weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise an `HddmError` if the weights of ``path`` are int8 or uint8, or have scales of their own.

    Plain float8 is no such quantisation: it is read as other floats are.
    """
    found = [name for name in weights if _QUANTISED.fullmatch(name)]
    for name, value in weights.items():
        if name.endswith("weight") and value.dtype in (torch.int8, torch.uint8):
            found.append(name)
    if found:
        kind = str(weights[found[-1]].dtype).removeprefix("torch.")
        count = f" and {len(found) - 1} more" if len(found) > 1 else ""
        text = f"holds quantised weights ({found[-1]!r} in {kind}{count})"
        raise HddmError(f"{path}: {text}, {_UNQUANTISED}")


class WeightsReader:
    """Reader of a weights file; refuses NaN and Inf at the first read, and a file gone or changed since."""

    def __init__(self, path: Path) -> None:
        self.path, self._identity = path, identity_of(path)
        self._is_checked = False

    def __call__(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors in ``dtype``."""
        return cast(self.stored(), dtype)

    def stored(self) -> dict[str, Tensor]:
        """All tensors as stored, mapped."""
        if not self.path.exists():
            text = "was moved or deleted after the model was opened; keep the folder, or load the model anew"
            raise HddmError(f"{self.path}: {text}")
        # Another expert may have replaced the folder.
        if identity_of(self.path) != self._identity:
            raise HddmError(f"{self.path}: has changed since it was opened; load the model again")
        weights = read_safetensors(self.path)
        if not self._is_checked:
            refuse_non_finite(self.path, weights)
            self._is_checked = True
        return weights


def cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """``weights`` in ``dtype``; tensors that are cast share one memory block, so that it can be freed.

    Whole and complex numbers, as the constants of a program, stay as they are.
    """
    others = {}
    for key, value in weights.items():
        if value.dtype != dtype and value.is_floating_point():
            others[key] = value
    align = 64 // dtype.itemsize
    lengths = [-(-value.numel() // align) * align for value in others.values()]
    places = torch.empty(sum(lengths), dtype=dtype).split(lengths)
    for (key, value), place in zip(others.items(), places, strict=True):
        others[key] = place[: value.numel()].view(value.shape).copy_(value)
    return {**weights, **others}
