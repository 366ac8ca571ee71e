"""Single files of weights: weight sets and wrappers' prefixes are undone, the layout is recognised."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hddm.checkpoints import ldm
from hddm.checkpoints.facebook_dit import FACEBOOK_DIT
from hddm.checkpoints.layouts import FileLayout
from hddm.checkpoints.pixart_original import PIXART_ORIGINAL
from hddm.checkpoints.sources import Checkpoint, Declared, Reading, Tensors, WeightSet, choose_set, read_file
from hddm.utils.errors import HddmError

FILE_LAYOUTS: dict[str, FileLayout] = {one.name: one for one in (FACEBOOK_DIT, PIXART_ORIGINAL)}
LDM = ldm.LAYOUT
_RAW, _EMA = ("model", "state_dict"), ("ema", "state_dict_ema", "model_ema", "ema_model", "ema_state_dict")
_SETS: dict[str, WeightSet] = {**dict.fromkeys(_RAW, "raw"), **dict.fromkeys(_EMA, "ema")}
# What those who average weights, or share them out, put around a set.
_TOP = ""
_INNER = ("shadow", "shadow_params", "module", "model", "state_dict")
_PREFIXES = ("module.", "_orig_mod.", "model.")
IMAGENET_CLASSES = 1000
IMAGENET_LICENCE = (
    "CC-BY-NC-4.0 (assumed: it has the 1,000 classes of the released ImageNet DiT weights, which are "
    "non-commercial; --licence states another)"
)


def open_file(path: Path, reading: Reading) -> Checkpoint:
    """The checkpoint in one file.

    Raises:
        HddmError: for content of no known layout, or another than asked for.
    """
    content = read_file(path, reading.allow_pickle)
    if reading.layout in (None, LDM):
        networks = _sources(content, lambda one: set(ldm.MARKERS) <= set(one), reading, path)
        if len(networks) > 1:
            raise HddmError(f"{path}: {_listed(networks)} hold whole networks; save one in a file of its own")
        if networks:
            return _open_ldm(path, next(iter(networks.values())), reading)
    sets = _weight_sets(content, reading, path)
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
    latent_scale, notes = layout.latents(weights)
    return Checkpoint(
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
        latent_scale=latent_scale,
        licence=IMAGENET_LICENCE if classes == IMAGENET_CLASSES else None,
        notes=notes,
    )


def _open_ldm(path: Path, everything: Tensors, reading: Reading) -> Checkpoint:
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
    if "ztsnr" in everything:
        notes.append("ztsnr marks training to no signal: a --schedule has to say rescale_betas_zero_snr")
    if reading.hints.sample_size is None:
        side = arguments["sample_size"]
        notes.append(f"samples of side {side} are assumed; --sample-size says otherwise")
    return Checkpoint(
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
        kept=ldm.buffers(everything),
    )


def _weight_sets(content: Mapping[str, Any], reading: Reading, path: Path) -> dict[WeightSet, Tensors]:
    """Sets of weights by name: nested ones, ones with prefixes of their own, or all tensors as one set.

    A file that holds one set under the name of the raw one need not mean that: published ones do not.
    """
    heads = {name.split(".")[0] for name in content}
    if len(heads) > 1 and heads <= set(_SETS) and not heads & set(content):
        content = {
            head: {k.removeprefix(f"{head}."): v for k, v in content.items() if k.startswith(f"{head}.")}
            for head in heads
        }
    sources = _sources(content, _is_known, reading, path)
    found: dict[WeightSet, str] = {}
    for name in sources:
        kind = _SETS.get(name, "unstated")
        if kind in found or sources.keys() > {_TOP}:
            raise HddmError(
                f"{path}: {_listed(sources)} hold weights alike; save one set in a file of its own"
            )
        found[kind] = name
    if not found:
        named = {_SETS[k]: _tensors(v) for k, v in content.items() if k in _SETS and isinstance(v, dict)}
        return named or {"unstated": _tensors(content)}
    if list(found.values()) == ["state_dict"]:
        return {"unstated": sources["state_dict"]}
    return {kind: sources[name] for kind, name in found.items()}


def _sources(
    content: Mapping[str, Any], holds: Callable[[Tensors], bool], reading: Reading, path: Path
) -> dict[str, Tensors]:
    """Every set of weights in a file that ``holds`` what a layout has, by its name there.

    Raises:
        HddmError: for one under a name that does not say what it is, or an average that cannot be read.
    """
    top = _tensors(content)
    found = {_TOP: top} if holds(top) else {}
    for name, value in content.items():
        if not isinstance(value, dict):
            continue
        inner = [_tensors(one) for one in (value, *map(value.get, _INNER)) if isinstance(one, dict)]
        inner = [one for one in inner if holds(one)]
        if len(inner) > 1 or (inner and name not in _SETS):
            raise HddmError(
                f"{path}: holds weights under {name!r}, which does not say which they are; save one set in a "
                "file of its own"
            )
        if inner:
            found[name] = inner[0]
    lost = [name for name in _EMA if name not in found and _has_tensors(content.get(name))]
    if found and lost and reading.weights != "raw":
        raise HddmError(
            f"{path}: the averaged weights in {lost[0]!r} are not under the names of their network; pass "
            "--weights raw to take the others"
        )
    return found


def _is_known(tensors: Tensors) -> bool:
    names = set(_strip(tensors)[0])
    return any(set(layout.markers) <= names for layout in FILE_LAYOUTS.values())


def _has_tensors(value: object) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor) or any(map(_has_tensors, inner))


def _listed(names: Iterable[str]) -> str:
    return " and ".join(repr(name) if name != _TOP else "its top level" for name in names)


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
    candidates: list[FileLayout],
    asked: str | None,
    path: Path,
    stripped: Mapping[WeightSet, tuple[Tensors, str]],
) -> FileLayout:
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
