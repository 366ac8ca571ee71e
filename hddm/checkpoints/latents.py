"""The VAE beside a network: how it scales latents, and which one it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hddm.checkpoints.layouts import LATENT_SCALE
from hddm.components.identity import VaeFacts
from hddm.components.vae import LARGEST_SCALE, vae_facts
from hddm.errors import HddmError
from hddm.files import read_json
from hddm.paths import inside

VAES = ("vae", "vqvae", "movq")
# Class and scale of those whose config does not say.
_DEFAULT_VAES = {"vae": "AutoencoderKL", "vqvae": "VQModel"}
_DEFAULT_SCALES = {"AutoencoderKL": LATENT_SCALE, "VQModel": LATENT_SCALE, "AutoencoderTiny": 1.0}


def latents_of(
    above: Path, is_stated: bool, arguments: Mapping[str, Any]
) -> tuple[float | None, bool, tuple[str, ...]]:
    """Scale of the VAE in the pipeline ``above``, whether there is one, and what was assumed.

    ``is_stated`` says whether the pipeline's index names one; ``arguments`` are the network's.

    Raises:
        HddmError: for a scale that is no positive number.
    """
    name = next((one for one in VAES if (above / one / "config.json").exists()), None)
    if name is None:
        is_latent = is_stated or arguments.get("in_channels") not in (1, 3)
        return (None if is_latent else 1.0), is_latent, ()
    path = above / name / "config.json"
    config = read_json(inside(above, f"{name}/config.json"))
    kind = config.get("_class_name", _DEFAULT_VAES.get(name))
    if name == "movq":
        return None, True, (f"{path}: whether a movq's latents are scaled is not known",)
    if "scaling_factor" in config:
        factor = config["scaling_factor"]
        if not isinstance(factor, int | float) or not 0 < factor < LARGEST_SCALE:
            raise HddmError(
                f"{path}: scaling_factor is {str(factor)[:40]}, and must be a positive number, below "
                f"{LARGEST_SCALE:.0e}"
            )
        return float(factor), True, ()
    if kind in _DEFAULT_SCALES:
        default = _DEFAULT_SCALES[kind]
        return default, True, (f"{path}: no scaling_factor, so {kind}'s default {default}",)
    return None, True, (f"{path}: no scaling_factor, and the default of a {str(kind)[:40]} is not known",)


def vae_of(above: Path, variant: str | None) -> tuple[VaeFacts | None, tuple[str, ...]]:
    """What tells the VAE in the pipeline ``above`` from others, or why that is not known.

    The weights of the denoiser do not need it: a VAE that was not fetched, or that is of another class than
    hddm decodes with, must not be in their way.
    """
    if not (above / "vae" / "config.json").exists():
        return None, ()
    try:
        return vae_facts(above / "vae", variant), ()
    except HddmError as error:
        return None, (f"the expert does not say which VAE made its latents: {error}",)
