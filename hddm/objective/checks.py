"""What can be scored or weighed by the objective, decided before anything is read."""

from pathlib import Path

from hddm.settings import CalibrationSettings
from hddm.strategies import Strategy
from hddm.utils.errors import HddmError, UsageError


def check_weighing(data: Path | None, settings: CalibrationSettings) -> None:
    """Raise a `UsageError` for an ensemble without held-out images, and for options of an expert alone."""
    if data is None:
        raise UsageError(
            "`data`: is required for an ensemble; name images that no expert was trained on"
        )
    plain = CalibrationSettings()
    for name in ("num_images", "steps"):
        if getattr(settings, name) != getattr(plain, name):
            raise UsageError(f"`{name}`: is for an expert's own samples; an ensemble takes `data`")


def refuse_shared_noise(num_domains: int, num_experts: int) -> None:
    """Raise an `HddmError` for experts that share t among them, which nothing weighs."""
    if num_domains < num_experts:
        raise HddmError("experts that cover parts of the noise have no weights by reliability")


def why_unscored(strategy: str, has_likelihood: bool = True) -> str:
    """Why nothing is measured of samples that a strategy makes with several experts; empty if something is.

    Without ``has_likelihood`` errors alone are measured.
    """
    kind = Strategy.parse(strategy).kind
    if kind == "commit":
        return "below its noise level each sample keeps an expert, so a state has no velocity of its own"
    if kind == "draw" and not has_likelihood:
        return "samples have a likelihood and no errors, and without a likelihood nothing is left to score"
    return ""
