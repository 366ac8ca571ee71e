"""Published conventions of Stable Diffusion, which single files do not state: one word for each.

Each states the noise schedule, what the network predicts, the scale of its latents, the size of its samples
and its attention heads. Its source is the model card or code that publishes them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from hddm.checkpoints.headers import Header
from hddm.checkpoints.markers import EDM_MEAN, SIGMA_MAX, V_MARKER, Markers, Statistics
from hddm.networks.encoders import STABLE_DIFFUSION_SCALE
from hddm.predictions import PredictionType
from hddm.settings import PresetName
from hddm.utils.errors import HddmError

_XL_SCALE = 0.13025
_HEAD_WIDTH = 64
"""Of a head where every head has the same width."""
_DDPM = {
    "_class_name": "DDPMScheduler",
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "trained_betas": None,
    "rescale_betas_zero_snr": False,
}
"""arXiv:2112.10752, and ``scheduler/scheduler_config.json`` of every model here that has betas."""
_EDM = {"_class_name": "EDMEulerScheduler", "sigma_min": 0.002}
_FLOW = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 1.0,
}


Kind = Literal["1", "2", "XL"]
"""Of Stable Diffusion, by shapes: XL takes the sizes of a picture; 2 projects by linear layers, 1 not."""


@dataclass(frozen=True)
class Preset:
    """A published convention.

    Args:
        name: as in ``--preset``.
        kind: of its network.
        scheduler: training schedule, as a config of diffusers.
        prediction_type: what the network predicts.
        latent_scale: of its VAE.
        sample_size: side of its latents.
        num_heads: heads at every level; None for heads of 64 numbers.
        source: what publishes all this.
        marker: a tensor that only files of this convention have.
        statistics: of its latents.
    """

    name: str
    kind: Kind
    scheduler: Mapping[str, Any]
    prediction_type: PredictionType
    latent_scale: float
    sample_size: int
    source: str
    num_heads: int | None = None
    marker: str | None = None
    statistics: Statistics | None = None

    @property
    def place(self) -> str:
        """The preset as the origin of a statement."""
        return f"preset {self.name} ({self.source})"

    @property
    def has_betas(self) -> bool:
        """True for a schedule of betas, which can be rescaled."""
        return "beta_schedule" in self.scheduler

    def heads(self, widths: list[int], origin: str) -> int | list[int]:
        """Heads by level, for levels of these widths."""
        if self.num_heads is not None:
            odd = [width for width in widths if width % self.num_heads]
            if odd:
                raise HddmError(
                    f"`preset` {self.name}: a width of {odd[0]} in {origin} does not divide by its "
                    f"{self.num_heads} heads; pass `num_heads`"
                )
            return self.num_heads
        odd = [width for width in widths if width % _HEAD_WIDTH and width > _HEAD_WIDTH]
        if odd:
            raise HddmError(
                f"`preset` {self.name}: a width of {odd[0]} in {origin} is no multiple of the width "
                f"{_HEAD_WIDTH} of its heads; pass `num_heads`"
            )
        return [max(width // _HEAD_WIDTH, 1) for width in widths]

    def without_signal(self) -> "Preset":
        """The same preset with its betas rescaled to zero signal at their end (arXiv:2305.08891)."""
        return replace(self, scheduler={**self.scheduler, "rescale_betas_zero_snr": True})

    def stating(self, markers: Markers, has_no_signal: bool) -> "Preset":
        """The same preset with what a file states: statistics, ends of the schedule, or no signal there."""
        statistics = markers.statistics or self.statistics
        if is_edm(self):
            return replace(
                self, scheduler={**self.scheduler, **markers.sigmas}, statistics=statistics
            )
        return self.without_signal() if has_no_signal and self.has_betas else self


def _preset(
    name: PresetName,
    kind: Kind,
    prediction_type: PredictionType,
    sample_size: int,
    source: str,
    scheduler: Mapping[str, Any] = _DDPM,
    marker: str | None = None,
    latent_scale: float = _XL_SCALE,
    statistics: Statistics | None = None,
) -> Preset:
    is_flow = prediction_type is PredictionType.FLOW_PREDICTION
    stated = {} if is_flow else {"prediction_type": prediction_type.value}
    return Preset(
        name=name,
        kind=kind,
        scheduler={**scheduler, **stated},
        prediction_type=prediction_type,
        latent_scale=latent_scale if kind == "XL" else STABLE_DIFFUSION_SCALE,
        sample_size=sample_size,
        source=source,
        num_heads=8 if kind == "1" else None,
        marker=marker,
        statistics=statistics,
    )


_EPSILON, _V, _VELOCITY = (
    PredictionType.EPSILON,
    PredictionType.V_PREDICTION,
    PredictionType.FLOW_PREDICTION,
)
_PLAYGROUND = (-1.6574, 1.886, -1.383, 2.5155), (8.4927, 5.9022, 6.5498, 5.2299)
"""latents_mean and latents_std in ``vae/config.json`` of Playground 2.5."""
_ALL = (
    _preset("sd1", "1", _EPSILON, 64, "huggingface.co/stable-diffusion-v1-5/stable-diffusion-v1-5"),
    _preset("sd2", "2", _EPSILON, 64, "huggingface.co/stabilityai/stable-diffusion-2-base"),
    _preset("sd2-v", "2", _V, 96, "huggingface.co/stabilityai/stable-diffusion-2"),
    _preset("sdxl", "XL", _EPSILON, 128, "huggingface.co/stabilityai/stable-diffusion-xl-base-1.0"),
    _preset("sdxl-v", "XL", _V, 128, "huggingface.co/Laxhar/noobai-XL-Vpred-1.0", marker=V_MARKER),
    _preset("sdxl-flow", "XL", _VELOCITY, 128, "huggingface.co/fancyfeast/bigaspv2-5", _FLOW),
    # EDM's own network, which diffusers' scheduler calls epsilon.
    _preset(
        "playground-2.5",
        "XL",
        _EPSILON,
        128,
        "huggingface.co/playgroundai/playground-v2.5-1024px-aesthetic",
        {**_EDM, "sigma_max": 80.0, "sigma_data": 0.5},
        EDM_MEAN,
        0.5,
        _PLAYGROUND,
    ),
    _preset(
        "cosxl",
        "XL",
        _V,
        128,
        "huggingface.co/stabilityai/cosxl",
        {**_EDM, "sigma_max": 120.0, "sigma_data": 1.0},
        SIGMA_MAX,
    ),
)
PRESETS: Mapping[str, Preset] = {one.name: one for one in _ALL}
"""Presets by name, those of one kind of network beside each other."""
assert tuple(PRESETS) == get_args(PresetName)


def fitting(kind: Kind) -> tuple[str, ...]:
    """Names of the presets for a network of this kind."""
    return tuple(name for name, one in PRESETS.items() if one.kind == kind)


def choose_preset(
    stated: str | None,
    kind: Kind,
    markers: Markers,
    header: Header,
    origin: str,
    is_published: bool = True,
) -> Preset | None:
    """The preset that the user ``stated``, or the only one that the file's markers or header mean.

    A header means one where it names both the kind of network and
    what it predicts. Raises `HddmError` for statements that contradict the ``kind`` that the tensors show;
    unless the network has the widths that are published, a header is not asked whether it is 1 or 2.
    """
    shown = f"{origin}: its tensors are those of Stable Diffusion {kind}, which contradicts"
    for place, other in header.kinds.items():
        if other != kind and (is_published or "XL" in (other, kind)):
            raise HddmError(f"{shown} {place}, which says {other}; correct the header")
    chosen = PRESETS[stated] if stated is not None else None
    if chosen is not None and chosen.kind != kind:
        raise HddmError(
            f"{shown} `preset` {stated}, which is of Stable Diffusion {chosen.kind}; those that fit are "
            f"{', '.join(fitting(kind))}"
        )
    marked = _marked(markers, kind, origin)
    if chosen is not None and marked is not None and is_edm(marked) and chosen != marked:
        raise HddmError(
            f"{origin}: its {marked.marker} is of the preset {marked.name}, which contradicts `preset` "
            f"{stated}; drop the option"
        )
    chosen = chosen or marked
    if chosen is None and header.kinds and len(set(header.predictions.values())) == 1:
        (predicted,) = set(header.predictions.values())
        fit = [PRESETS[name] for name in fitting(kind)]
        agreeing = [one for one in fit if one.prediction_type == predicted and not is_edm(one)]
        chosen = agreeing[0] if len(agreeing) == 1 else None
    if chosen is None:
        return None
    return chosen.stating(markers, markers.has_no_signal or header.zero_snr is not None)


def _marked(markers: Markers, kind: Kind, origin: str) -> Preset | None:
    """The preset that a file's markers mean; `HddmError` for one of another kind of network."""
    for one in PRESETS.values():
        if one.marker is None or one.marker != markers.name:
            continue
        if one.kind == kind:
            return one
        if is_edm(one):
            raise HddmError(
                f"{origin}: its {one.marker} is of the preset {one.name}, which is of Stable Diffusion "
                f"{one.kind}, and its tensors are those of {kind}; remove it"
            )
    return None


def is_edm(preset: Preset) -> bool:
    """True for a preset of EDM's schedule."""
    return bool(preset.scheduler["_class_name"] == _EDM["_class_name"])


def is_near(one: float, other: float) -> bool:
    """True for one number up to the rounding of half precision."""
    return math.isclose(one, other, rel_tol=1e-3)
