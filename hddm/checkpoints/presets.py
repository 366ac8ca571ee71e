"""Published conventions of Stable Diffusion, which single files do not state: one word for each.

Each states the noise schedule, what the network predicts, the scale of its latents, the size of its samples
and its attention heads. Its source is the model card or code that publishes them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from hddm.checkpoints.headers import Header
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
    """

    name: str
    kind: Kind
    scheduler: Mapping[str, Any]
    prediction_type: PredictionType
    latent_scale: float
    sample_size: int
    source: str
    num_heads: int | None = None

    @property
    def place(self) -> str:
        """The preset as the origin of a statement."""
        return f"preset {self.name} ({self.source})"

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


def _preset(
    name: PresetName,
    kind: Kind,
    prediction_type: PredictionType,
    sample_size: int,
    source: str,
    scheduler: Mapping[str, Any] = _DDPM,
) -> Preset:
    is_flow = prediction_type is PredictionType.FLOW_PREDICTION
    stated = {} if is_flow else {"prediction_type": prediction_type.value}
    return Preset(
        name=name,
        kind=kind,
        scheduler={**scheduler, **stated},
        prediction_type=prediction_type,
        latent_scale=_XL_SCALE if kind == "XL" else STABLE_DIFFUSION_SCALE,
        sample_size=sample_size,
        source=source,
        num_heads=8 if kind == "1" else None,
    )


_EPSILON, _V, _VELOCITY = (
    PredictionType.EPSILON,
    PredictionType.V_PREDICTION,
    PredictionType.FLOW_PREDICTION,
)
_ALL = (
    _preset("sd1", "1", _EPSILON, 64, "huggingface.co/stable-diffusion-v1-5/stable-diffusion-v1-5"),
    _preset("sd2", "2", _EPSILON, 64, "huggingface.co/stabilityai/stable-diffusion-2-base"),
    _preset("sd2-v", "2", _V, 96, "huggingface.co/stabilityai/stable-diffusion-2"),
    _preset("sdxl", "XL", _EPSILON, 128, "huggingface.co/stabilityai/stable-diffusion-xl-base-1.0"),
    _preset("sdxl-v", "XL", _V, 128, "huggingface.co/Laxhar/noobai-XL-Vpred-1.0"),
    _preset("sdxl-flow", "XL", _VELOCITY, 128, "huggingface.co/fancyfeast/bigaspv2-5", _FLOW),
)
PRESETS: Mapping[str, Preset] = {one.name: one for one in _ALL}
"""Presets by name, those of one kind of network beside each other."""
assert tuple(PRESETS) == get_args(PresetName)
V_MARKER, ZERO_MARKER = "v_pred", "ztsnr"
"""Empty tensors by which ComfyUI knows networks that predict v, and that were trained to no signal."""
_BY_MARKER = "sdxl-v"
"""Preset of files of XL with `V_MARKER`."""


def fitting(kind: Kind) -> tuple[str, ...]:
    """Names of the presets for a network of this kind."""
    return tuple(name for name, one in PRESETS.items() if one.kind == kind)


def choose_preset(
    stated: str | None,
    kind: Kind,
    markers: Collection[str],
    header: Header,
    origin: str,
    is_published: bool = True,
) -> Preset | None:
    """The preset that the user ``stated``, or the only one that the file's markers or header mean.

    ``markers`` are the names of its tensors. A header means one where it names both the kind of network and
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
    if chosen is None and kind == "XL" and V_MARKER in markers:
        chosen = PRESETS[_BY_MARKER]
    if chosen is None and header.kinds and len(set(header.predictions.values())) == 1:
        (predicted,) = set(header.predictions.values())
        fit = [PRESETS[name] for name in fitting(kind)]
        agreeing = [one for one in fit if one.prediction_type == predicted]
        chosen = agreeing[0] if len(agreeing) == 1 else None
    has_no_signal = ZERO_MARKER in markers or header.zero_snr is not None
    if chosen is not None and chosen.name == _BY_MARKER and has_no_signal:
        return chosen.without_signal()
    return chosen
