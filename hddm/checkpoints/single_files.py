"""One file that holds a whole network: weight sets and wrappers' prefixes undone, its layout recognised."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.checkpoints import ldm
from hddm.checkpoints.facebook_dit import FACEBOOK_DIT
from hddm.checkpoints.layouts import Layout
from hddm.checkpoints.pixart_original import PIXART_ORIGINAL
from hddm.checkpoints.sources import Declared, Reading, Source, Tensors, choose_set, read_file
from hddm.errors import HddmError

FILE_LAYOUTS: dict[str, Layout] = {one.name: one for one in (FACEBOOK_DIT, PIXART_ORIGINAL)}
LDM = ldm.LAYOUT
_SETS = {"ema": "ema", "state_dict_ema": "ema", "model": "raw", "state_dict": "raw"}
_PREFIXES = ("module.", "_orig_mod.", "model.")
_IMAGENET_CLASSES = 1000
IMAGENET_LICENCE = "CC-BY-NC-4.0 (the released ImageNet DiT weights; non-commercial)"


def open_file(path: Path, reading: Reading) -> Source:
    """The checkpoint in one file.

    Raises:
        HddmError: for content of no known layout, or another than asked for.
    """
    content = read_file(path, reading.allow_pickle)
    wrapped = content.get("state_dict")
    flat = wrapped if isinstance(wrapped, dict) and set(ldm.MARKERS) <= set(wrapped) else content
    if set(ldm.MARKERS) <= set(flat) and reading.layout in (None, LDM):
        return _open_ldm(path, _tensors(flat), reading)
    sets = _weight_sets(content)
    stripped = {name: _strip(tensors) for name, tensors in sets.items()}
    candidates = [
        layout
        for layout in FILE_LAYOUTS.values()
        if any(set(layout.markers) <= set(tensors) for tensors, _ in stripped.values())
    ]
    layout = _pick(candidates, reading.layout, path, stripped)
    own = {n: (t, p) for n, (t, p) in stripped.items() if reading.layout or set(layout.markers) <= set(t)}
    chosen = choose_set({name: tensors for name, (tensors, _) in own.items()}, reading.weights, str(path))
    weights, prefix = own[chosen]
    arguments = layout.arguments(weights, reading.hints, str(path))
    classes = arguments.get("num_classes")
    return Source(
        path=path,
        layout=layout.name,
        files=(path,),
        weights=weights,
        network=layout.network,
        arguments=arguments,
        table=layout.table(arguments, weights),
        forward=lambda: layout.forward(weights, arguments),
        declared=Declared(layout.scheduler, f"the code of layout {layout.name}", is_layout_rule=True),
        sets=tuple(own),
        chosen=chosen,
        prefix=prefix,
        nulls={name: key for name, key in layout.nulls.items() if key in weights},
        latent_scale=layout.latent_scale,
        licence=IMAGENET_LICENCE if classes == _IMAGENET_CLASSES else None,
    )


def _open_ldm(path: Path, everything: Tensors, reading: Reading) -> Source:
    sets = ldm.weight_sets(everything)
    chosen = choose_set(sets, reading.weights, str(path))
    weights = sets[chosen]
    arguments = ldm.arguments(weights, reading.hints, str(path))
    table = ldm.table(arguments, weights, str(path))
    betas, betas_origin = ldm.betas(everything)
    strangers = ldm.strangers(everything)
    if strangers:
        raise HddmError(f"{path}: its tensors are not those of the layout: left over {', '.join(strangers)}")
    parts = sum(name.startswith(ldm.OTHER_PARTS) for name in everything)
    notes = [f"{parts} tensors of its VAE and text encoder are left alone"] if parts else []
    if reading.hints.sample_size is None:
        side = arguments["sample_size"]
        notes.append(f"samples of side {side} are assumed; --sample-size says otherwise")
    return Source(
        path=path,
        layout=LDM,
        files=(path,),
        weights=weights,
        network=ldm.NETWORK,
        arguments=arguments,
        table=table,
        forward=lambda: ldm.forward(weights, arguments),
        declared=Declared(
            {"name": "discrete", "betas": betas} if betas else None,
            betas_origin,
            prediction_type=ldm.prediction_type(everything),
        ),
        sets=tuple(sets),
        chosen=chosen,
        latent_scale=ldm.latent_scale(everything),
        notes=tuple(notes),
    )


def _weight_sets(content: Mapping[str, Any]) -> dict[str, Tensors]:
    """Sets of weights by name: nested ones, ones told apart by a prefix, or the whole as one.

    A file that holds one set under the name of the raw one need not mean that: published ones do not.
    """
    nested = {_SETS[k]: _tensors(v) for k, v in content.items() if k in _SETS and isinstance(v, dict)}
    if not nested:
        heads = {name.split(".")[0] for name in content}
        if len(heads) > 1 and heads <= set(_SETS):
            nested = {
                _SETS[head]: {
                    k.removeprefix(f"{head}."): v for k, v in content.items() if k.startswith(f"{head}.")
                }
                for head in heads
            }
    if not nested:
        return {"unstated": _tensors(content)}
    return {"unstated": nested["raw"]} if list(nested) == ["raw"] and "state_dict" in content else nested


def _tensors(content: Mapping[str, Any]) -> Tensors:
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _strip(tensors: Tensors) -> tuple[Tensors, str]:
    """Tensors without what wrappers put before every name, and that prefix."""
    prefix = ""
    while tensors:
        found = next((p for p in _PREFIXES if all(name.startswith(p) for name in tensors)), None)
        if found is None:
            break
        prefix += found
        tensors = {name.removeprefix(found): tensor for name, tensor in tensors.items()}
    return tensors, prefix


def _pick(
    candidates: list[Layout], asked: str | None, path: Path, stripped: Mapping[str, tuple[Tensors, str]]
) -> Layout:
    if asked is not None:
        if asked not in FILE_LAYOUTS:
            raise HddmError(
                f"--layout {asked}: {path} is a single file; choose {', '.join([*FILE_LAYOUTS, LDM])}"
            )
        return FILE_LAYOUTS[asked]
    if len(candidates) == 1:
        return candidates[0]
    names = sorted(name for tensors, _ in stripped.values() for name in tensors)
    some = ", ".join(names[:5]) or "no tensors at all"
    raise HddmError(
        f"{path}: of no known layout ({some}, …): known are {', '.join([*FILE_LAYOUTS, LDM])}; a diffusers "
        "model is a folder with its config.json"
    )
