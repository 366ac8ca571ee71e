"""What routes the experts of a folder, and the strategy that the folder recommends."""

from dataclasses import dataclass
from pathlib import Path

from hddm.experts.ensemble_records import MOMENTS, MOMENTS_EVIDENCE, RELIABILITY, ROUTER
from hddm.utils.hub import local


@dataclass(frozen=True)
class RecommendedStrategy:
    """A strategy that a folder recommends, and why; without a reason where someone chose it."""

    name: str
    reason: str | None = None


# Both were measured (docs/results.md).
DRAWN = RecommendedStrategy(
    "draw",
    "the default: with experts of unlike data, no strategy made samples nearer to real images than one "
    "expert per image",
)
WEIGHED = RecommendedStrategy(
    "full",
    "the default where weights by noise level mix experts of the same data: the mix had fewer bits per "
    "dimension than one expert per image, and samples nearer to real images",
)


@dataclass(frozen=True)
class Routing:
    """How a new ensemble is routed: by a learned router in ``folder``, by ``evidence``'s moments, or not.

    ``is_new`` is a router that was not checked before. ``by_reliability`` are weights by noise level.
    """

    folder: Path | None = None
    evidence: float | None = None
    is_new: bool = True
    by_reliability: bool = False

    @property
    def is_absent(self) -> bool:
        """True if nothing routes, so that one expert is drawn per sample."""
        return self.folder is None and self.evidence is None and not self.by_reliability

    @property
    def default_strategy(self) -> RecommendedStrategy:
        """What a new folder with it recommends.

        An `hddm.Ensemble` in memory has ``nucleus-0.9`` instead: its callers rely on a default that looks at
        x_t.
        """
        return WEIGHED if self.by_reliability else DRAWN

    @property
    def name(self) -> str | None:
        """What an ensemble's record calls it."""
        if self.evidence is not None:
            return MOMENTS
        if self.by_reliability:
            return RELIABILITY
        return None if self.folder is None else ROUTER


def named_router(router: str | Path | None) -> Routing:
    """Routing by what a caller names: a router's folder, ``moments``, ``reliability``, or none."""
    if router == MOMENTS:
        return Routing(evidence=MOMENTS_EVIDENCE)
    if router == RELIABILITY:
        return Routing(by_reliability=True)
    return Routing(None if router is None else local(router))
