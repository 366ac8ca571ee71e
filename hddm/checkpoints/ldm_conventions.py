"""What a single file of Stable Diffusion and its user say of its conventions, beside its tensors' shapes.

Markers, buffers and the header choose a preset and complete it; what contradicts itself is refused.
"""

import re
from dataclasses import dataclass
from typing import Any

from diffusers.schedulers.scheduling_ddpm import rescale_zero_terminal_snr

from hddm.checkpoints.headers import REFINER, Header
from hddm.checkpoints.ldm import EMA, OTHER_PARTS, UNET
from hddm.checkpoints.markers import V_MARKER, number_in, read_markers
from hddm.checkpoints.presets import Kind, Preset, choose_preset, fitting, is_near
from hddm.checkpoints.sources import REMEDY, Declared, Weights
from hddm.networks.encoders import KL, STABLE_DIFFUSION_SCALE
from hddm.predictions import PredictionType
from hddm.schedule_records import MOST_STEPS
from hddm.settings import Reading
from hddm.utils.errors import HddmError, Unstated, shown

_PIXELS = 8
"""Pixels to one side of a latent."""
_TEXT_WIDTHS = (768, 1024, 2048)
"""Of the published networks."""
_REFINER_TEXT = "conditioner.embedders.0.model."
_REFINER_WIDTHS = {"label_emb.0.0.weight": 2560, "attn2.to_k.weight": 1280}
"""Widths of the inputs of XL's refiner, which takes another vector and another text encoder."""
_BUFFERS = re.compile(
    r"betas|alphas_cumprod(_prev)?|(sqrt_|log_)\w+|posterior_\w+|lvlb_weights|logvar|scale_factor|"
    r"denoiser\.sigmas|v_pred|ztsnr|edm_mean|edm_std|edm_vpred\.sigma_(min|max)"
)


def kind_of(content: Weights) -> Kind:
    """The kind of Stable Diffusion whose shapes a network has."""
    if f"{UNET}label_emb.0.0.weight" in content:
        return "XL"
    for name, tensor in content.items():
        if name.startswith(f"{UNET}input_blocks.") and name.endswith(".proj_in.weight"):
            return "2" if tensor.ndim == 2 else "1"
    return "1"


def _text_width(content: Weights) -> int | None:
    """Width of the text that a network takes."""
    for name, tensor in content.items():
        if name.startswith(UNET) and name.endswith(".attn2.to_k.weight") and tensor.ndim == 2:
            return tensor.shape[1]
    return None


@dataclass(frozen=True)
class Statement:
    """What a user and a file say of its conventions, beside its tensors' shapes.

    ``reading`` is the user's, completed: with the preset that the file means, and the side of samples.
    ``is_preset_stated`` is true where the preset is the user's.
    """

    preset: Preset | None
    kind: Kind
    reading: Reading
    notes: tuple[str, ...] = ()
    zero_snr: str | None = None
    is_preset_stated: bool = False


def statement_of(content: Weights, header: Header, reading: Reading, origin: str) -> Statement:
    """What a file and its user say; `HddmError` as for `choose_preset`, and for a refiner."""
    _refuse_refiner(content, header, origin)
    kind, notes = kind_of(content), []
    text_width = _text_width(content)
    is_published = text_width in _TEXT_WIDTHS
    markers = read_markers(content, origin)
    preset = choose_preset(reading.preset, kind, markers, header, origin, is_published)
    if preset is not None and reading.preset is None:
        notes.append(f"{preset.name} is its preset, by its own markers or header")
    side = reading.sample_size
    if side is None and header.side is not None and header.side[0] % _PIXELS == 0:
        side = header.side[0] // _PIXELS
        notes.append(f"samples of side {side} by {header.side[1]}")
    if side is None and preset is not None:
        side = preset.sample_size
    name = None if preset is None else preset.name
    completed = reading.model_copy(update={"preset": name, "sample_size": side})
    zero_snr = "its ztsnr" if markers.has_no_signal else header.zero_snr
    if zero_snr is not None and preset is not None and preset.has_betas:
        notes.append(
            f"the betas of {preset.name} are rescaled to no signal at their end by {zero_snr}"
        )
    is_stated = reading.preset is not None
    return Statement(preset, kind, completed, tuple(notes), zero_snr, is_stated)


def _refuse_refiner(content: Weights, header: Header, origin: str) -> None:
    """Raise an `HddmError` for XL's refiner, by its text encoder, its widths or its header."""
    is_refiner = REFINER in header.kinds.values()
    is_refiner |= any(name.startswith(_REFINER_TEXT) for name in content)
    if kind_of(content) == "XL":
        for name, tensor in content.items():
            for end, width in _REFINER_WIDTHS.items():
                is_its = name.startswith(UNET) and name.endswith(end) and tensor.ndim == 2
                is_refiner |= is_its and tensor.shape[1] == width
    if is_refiner:
        raise HddmError(
            f"{origin}: is a refiner, which changes a given picture; convert its base model"
        )


def latent_scale_of(
    content: Weights, statement: Statement, origin: str
) -> tuple[float | None, str]:
    """The scale of the latents, and the place that says it.

    It is that of the file's ``scale_factor``, which must be the preset's, or the preset's; of a VAE of Stable
    Diffusion 1 and 2 it is else the default of its class. None where nothing says it.
    """
    scale, preset = None, statement.preset
    if "scale_factor" in content:
        scale = number_in(content, "scale_factor", origin)
    if scale is not None and preset is not None and not is_near(scale, preset.latent_scale):
        raise HddmError(
            f"{origin}: its scale_factor is {scale:g}, which contradicts {preset.place}, whose latents "
            f"are scaled by {preset.latent_scale:g}; pass another `preset`, or none"
        )
    if scale is not None:
        return scale, "its scale_factor"
    if preset is not None:
        return preset.latent_scale, preset.place
    if not any(name.startswith(OTHER_PARTS[0]) for name in content):
        return None, ""
    if statement.kind == "XL":
        return None, ""
    return STABLE_DIFFUSION_SCALE, f"the default of {KL}"


def latents_of(statement: Statement, scale: float | None) -> dict[str, Any]:
    """What the config of the file's VAE says of its latents: their ``scale``, and statistics by channel."""
    found: dict[str, Any] = {"scaling_factor": scale}
    if statement.preset is not None and statement.preset.statistics is not None:
        mean, deviation = statement.preset.statistics
        found |= {"latents_mean": list(mean), "latents_std": list(deviation)}
    return found


def choices(kind: Kind) -> str:
    """Presets for a kind of network, in words."""
    *first, last = fitting(kind)
    return f"{', '.join(first)} or {last}" if first else last


def declared(content: Weights, statement: Statement, scale: float | None, origin: str) -> Declared:
    """What the file's buffers and markers say; refuses tensors of no part.

    Trainers leave ``ztsnr`` in files trained down to zero signal, often beside the original betas; these are
    then rescaled as the trainers do (arXiv:2305.08891).
    """
    buffers = {name: tensor for name, tensor in content.items() if _BUFFERS.fullmatch(name)}
    known = (UNET, EMA, *OTHER_PARTS)
    strangers = [name for name in content if not name.startswith(known) and name not in buffers]
    if strangers:
        listed = ", ".join(shown(strangers))
        raise HddmError(
            f"{origin}: its tensors are not those of the layout: left over {listed}; {REMEDY}"
        )
    schedule, place = None, "the betas in the file"
    if "betas" in content and content["betas"].numel() > MOST_STEPS:
        raise HddmError(
            f"{origin}: betas has {content['betas'].numel()} numbers, and a schedule has at most "
            f"{MOST_STEPS}; remove it, and pass `schedule`"
        )
    if "betas" in content and content["betas"].numel():
        betas = content["betas"].double().flatten()
        if statement.zero_snr is not None and len(betas) > 1 and betas[-1] < 1:
            betas = rescale_zero_terminal_snr(betas)
            place += f", rescaled to no signal at their end as {statement.zero_snr} asks"
        schedule = {"name": "discrete", "betas": betas.tolist()}
    unstated: list[Unstated] = []
    if scale is None and any(name.startswith(OTHER_PARTS[0]) for name in content):
        text = f"does not say the scale of its latents; pass `preset` {choices(statement.kind)}"
        unstated.append(Unstated(origin, text, "preset"))
    return Declared(
        schedule,
        place,
        unstated=tuple(unstated),
        prediction_type=PredictionType.V_PREDICTION.value if V_MARKER in content else None,
        prediction_origin="its tensor v_pred",
        zero_snr=statement.zero_snr,
        latent_scale=scale,
        notes=statement.notes,
        kept=buffers,
        preset=statement.preset,
        is_preset_stated=statement.is_preset_stated,
        presets=choices(statement.kind),
    )
