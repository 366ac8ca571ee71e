"""What Paris's weights mean: conventions of the release, held against what lies beside the weights."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hddm.components.identity import TextEncoderFacts, VaeFacts
from hddm.components.text import text_encoder_facts
from hddm.components.vae import vae_facts
from hddm.errors import HddmError
from hddm.experts import ExpertFacts, SourceFacts
from hddm.files import read_json
from hddm.model_index import SCHEDULER_FILE, read_shift
from hddm.paths import inside
from hddm.predictions import PredictionType
from hddm.schedules import LinearSchedule

TIME_SCALE = 1000.0
LATENT_SCALE = 0.18215
TOKENS = 77
"""A prompt is padded to so many."""
PAPER = "arXiv:2510.03434"


def expert_facts(folder: Path, arguments: Mapping[str, Any]) -> ExpertFacts:
    """The facts of all experts in ``folder``, whose networks have these arguments.

    Raises:
        HddmError: for links that lead out of ``folder``, and a scheduler, VAE or text encoder that cannot be
            read or contradicts the experts.
    """
    scheduler, shift = _scheduler(folder)
    side = arguments["sample_size"]
    return ExpertFacts(
        objective="flow",
        prediction_type=PredictionType.FLOW_PREDICTION,
        schedule=LinearSchedule().config,
        schedule_source=PAPER if scheduler is None else SCHEDULER_FILE,
        time_scale=TIME_SCALE,
        sample_shape=(arguments["in_channels"], side, side),
        space="latents",
        latent_scale=LATENT_SCALE,
        vae=_vae(folder),
        text_encoder=_text_encoder(folder, arguments["text_dim"]),
        shift=shift,
        conditions=("encoder_hidden_states",),
        weights="unstated",
        # Hashing 20 GB would take longer than reading them.
        source=SourceFacts(layout="paris", files={}, scheduler=scheduler, hddm=version("hddm-diffusion")),
        licence="MIT",
    )


def _is_there(folder: Path, name: str) -> bool:
    # A broken link is there, and whoever reads it says what is wrong.
    return inside(folder, name).exists() or (folder / name).is_symlink()


def _scheduler(folder: Path) -> tuple[dict[str, Any] | None, float]:
    """The scheduler config, and the shift of its grid; none, and 1, where there is none."""
    if not _is_there(folder, "scheduler"):
        return None, 1.0
    inside(folder, SCHEDULER_FILE)
    shift, config = read_shift(folder), read_json(folder / SCHEDULER_FILE)
    steps = config.get("num_train_timesteps", TIME_SCALE)
    if steps != TIME_SCALE:
        raise HddmError(
            f"{folder / SCHEDULER_FILE}: num_train_timesteps is {str(steps)[:40]}, and Paris's networks "
            f"count {TIME_SCALE:g}; correct it"
        )
    return config, shift


def _vae(folder: Path) -> VaeFacts | None:
    if not _is_there(folder, "vae"):
        return None
    facts = vae_facts(folder / "vae")
    if (facts.scale, facts.shift) != (LATENT_SCALE, 0.0):
        raise HddmError(
            f"{folder / 'vae'}: scales latents by {facts.scale:g} and shifts them by {facts.shift:g}, and "
            f"Paris was trained on {LATENT_SCALE} and 0; put its own VAE there (sd-vae-ft-mse)"
        )
    return facts


def _text_encoder(folder: Path, width: int) -> TextEncoderFacts | None:
    if not _is_there(folder, "text_encoder"):
        return None
    facts = text_encoder_facts(folder / "text_encoder", TOKENS)
    if facts.width != width:
        raise HddmError(
            f"{folder / 'text_encoder'}: its tokens are {facts.width} wide, and the experts take {width}; "
            "put Paris's own there (CLIP ViT-L/14)"
        )
    return facts
