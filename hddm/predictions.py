"""What a network may predict: one class for each type, and all that differs between them.

A network sees a state of its own path, y = a x_0 + s eps. Its schedule gives a = alpha and s = sigma, and
their derivatives a' and s' by native time. The common path through x = y/(a + s) is x = (1 - t) x_0 + t eps,
with t = s/(a + s).

A new type is a class here, and its name in `PredictionType`.

Torch is not imported, since commands print their help without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from hddm.utils.errors import HddmError, choose

if TYPE_CHECKING:
    from torch import Tensor

BOUND = 0.05
"""The least t, or 1 - t, that the loss of a velocity divides by."""


@dataclass(frozen=True)
class Level:
    """A noise level of an expert's own path; every tensor broadcasts against states."""

    alpha: "Tensor"
    sigma: "Tensor"
    derivatives: Callable[[], tuple["Tensor", "Tensor"]]
    """Gives (d alpha, d sigma) by native time; refused for a discrete schedule."""


@dataclass(frozen=True)
class PathPoint(Level):
    """One state in both coordinates; every tensor broadcasts against ``x``.

    ``x`` is on the common path at ``t``, ``y = (alpha + sigma) x`` on the expert's own path.
    """

    x: "Tensor"
    y: "Tensor"
    t: "Tensor"


class Prediction(ABC):
    """A quantity that a network predicts. It has no state: one instance stands for all networks."""

    words: ClassVar[str]
    """What it is, in messages."""
    is_of_noise: ClassVar[bool] = False
    """It gives eps at every noise level, but x_0 only where there is signal: singular at a = 0 (t = 1)."""
    is_singular_at_data: ClassVar[bool] = False
    """Singular at s = 0 (t = 0)."""
    is_velocity: ClassVar[bool] = False
    """The velocity of the expert's own path: it has none if the path is discrete. On the common path it is
    the common velocity itself, which only flow matching learns."""
    has_velocity_loss: ClassVar[bool] = False
    """By default its loss is that of its velocity. Its noise levels are then those of flow matching, and flow
    matching that goes on with it still learns it, not the velocity."""
    is_in_diffusers: ClassVar[bool] = True
    """Schedulers of diffusers know it, by the name that it has here."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names in the headers of weights files."""

    @abstractmethod
    def output(self, x_0: "Tensor", eps: "Tensor", at: Level) -> "Tensor":
        """What a perfect network gives for y = a x_0 + s eps: the definition of this type."""

    @abstractmethod
    def x_0_and_eps(self, output: "Tensor", at: PathPoint) -> tuple["Tensor", "Tensor"]:
        """Estimates (x_0, eps) that a network's ``output`` implies for y = a x_0 + s eps.

        At a singular point the result is inf or nan; `hddm.velocity.VelocityField` never evaluates there.
        """

    @abstractmethod
    def velocity(self, output: "Tensor", at: PathPoint) -> "Tensor":
        """Velocity eps - x_0 of the common path through ``at.x``, per unit of t.

        Sources: arXiv:2412.06264 (affine paths); Diff2Flow (arXiv:2506.02221) for epsilon and v.
        """

    def error(self, output: "Tensor", x_0: "Tensor", eps: "Tensor", at: Level) -> "Tensor":
        """What a training squares, in float32: by default the error of the output itself."""
        return output.float() - self.output(x_0, eps, at).float()

    def velocity_weights(
        self, alpha: "Tensor", sigma: "Tensor", data_scale: float = 1.0
    ) -> "Tensor | None":
        """Weights (batch,) that make the squared error that of the velocity; None if all are 1.

        ``alpha`` and ``sigma`` are (batch,), of data ``data_scale`` times those of the common path. t and
        1 - t are replaced by `BOUND` where they are smaller.
        """
        return None

    def bounded_part(self, bound: float) -> tuple[float, float]:
        """The part of t where the gain is at most ``bound``, which is above 1.

        The gain is the factor of the output in the velocity of the common path. One that does not grow
        without bound is allowed everywhere.
        """
        return 0.0, 1.0


class Epsilon(Prediction):
    """The noise eps; x_0 = (y - s eps)/a, velocity (eps - x)/(1 - t)."""

    words = "noise"
    is_of_noise = True

    def output(self, x_0: "Tensor", eps: "Tensor", at: Level) -> "Tensor":
        return eps

    def x_0_and_eps(self, output: "Tensor", at: PathPoint) -> tuple["Tensor", "Tensor"]:
        return (at.y - at.sigma * output) / at.alpha, output

    def velocity(self, output: "Tensor", at: PathPoint) -> "Tensor":
        return (output - at.x) / (1 - at.t)

    def velocity_weights(
        self, alpha: "Tensor", sigma: "Tensor", data_scale: float = 1.0
    ) -> "Tensor":
        """1/(1 - t)²."""
        t = sigma / (alpha * data_scale + sigma)
        return (1 - t).clamp(min=BOUND) ** -2

    def bounded_part(self, bound: float) -> tuple[float, float]:
        return 0.0, 1 - 1 / bound


class Sample(Prediction):
    """The data x_0; eps = (y - a x_0)/s, velocity (x - x_0)/t."""

    words = "clean images"
    is_singular_at_data = True
    has_velocity_loss = True

    def output(self, x_0: "Tensor", eps: "Tensor", at: Level) -> "Tensor":
        return x_0

    def x_0_and_eps(self, output: "Tensor", at: PathPoint) -> tuple["Tensor", "Tensor"]:
        return output, (at.y - at.alpha * output) / at.sigma

    def velocity(self, output: "Tensor", at: PathPoint) -> "Tensor":
        return (at.x - output) / at.t

    def velocity_weights(
        self, alpha: "Tensor", sigma: "Tensor", data_scale: float = 1.0
    ) -> "Tensor":
        """1/(d t)² for data of scale d (arXiv:2511.13720)."""
        t = sigma / (alpha * data_scale + sigma)
        return (data_scale * t.clamp(min=BOUND)) ** -2

    def bounded_part(self, bound: float) -> tuple[float, float]:
        return 1 / bound, 1.0


class VPrediction(Prediction):
    """Salimans & Ho's v = a eps - s x_0 (arXiv:2202.00512); not a velocity in general.

    x_0 = (a y - s v)/(a² + s²), eps = (s y + a v)/(a² + s²), velocity [(s - a) y + (a + s) v]/(a² + s²);
    nowhere singular.
    """

    words = "v"
    aliases = ("v",)

    def output(self, x_0: "Tensor", eps: "Tensor", at: Level) -> "Tensor":
        return at.alpha * eps - at.sigma * x_0

    def x_0_and_eps(self, output: "Tensor", at: PathPoint) -> tuple["Tensor", "Tensor"]:
        a, s, y = at.alpha, at.sigma, at.y
        norm = a**2 + s**2
        return (a * y - s * output) / norm, (s * y + a * output) / norm

    def velocity(self, output: "Tensor", at: PathPoint) -> "Tensor":
        a, s = at.alpha, at.sigma
        return ((s - a) * at.y + (a + s) * output) / (a**2 + s**2)

    def velocity_weights(
        self, alpha: "Tensor", sigma: "Tensor", data_scale: float = 1.0
    ) -> "Tensor":
        """((a + s/d)/(a² + s²))² for data of scale d."""
        gain = (alpha + sigma / data_scale) / (alpha.square() + sigma.square())
        return gain.square()


class FlowPrediction(Prediction):
    """The velocity u = a' x_0 + s' eps of the expert's own path, per unit of its native time.

    With D = a s' - s a': x_0 = (s' y - s u)/D, eps = (a u - a' y)/D, velocity [(a + s) u - (a' + s') y]/D.
    On the linear path this is u itself. Its sign is diffusers' (noise minus data), the negative of that in
    SiT and in facebookresearch/flow_matching.
    """

    words = "the velocity of its path"
    is_velocity = True

    def output(self, x_0: "Tensor", eps: "Tensor", at: Level) -> "Tensor":
        d_a, d_s = at.derivatives()
        return d_a * x_0 + d_s * eps

    def x_0_and_eps(self, output: "Tensor", at: PathPoint) -> tuple["Tensor", "Tensor"]:
        a, s, y = at.alpha, at.sigma, at.y
        d_a, d_s = at.derivatives()
        det = a * d_s - s * d_a
        return (d_s * y - s * output) / det, (a * output - d_a * y) / det

    def velocity(self, output: "Tensor", at: PathPoint) -> "Tensor":
        a, s = at.alpha, at.sigma
        d_a, d_s = at.derivatives()
        return ((a + s) * output - (d_a + d_s) * at.y) / (a * d_s - s * d_a)


class PredictionType(StrEnum):
    """The type of a network's prediction by its name, spelt as diffusers spells it.

    ``prediction`` knows all about it.
    """

    EPSILON = "epsilon", Epsilon()
    """The noise eps."""
    SAMPLE = "sample", Sample()
    """The data x_0."""
    V_PREDICTION = "v_prediction", VPrediction()
    """Salimans & Ho's v = a eps - s x_0 (arXiv:2202.00512); not a velocity in general."""
    FLOW_PREDICTION = "flow_prediction", FlowPrediction()
    """The velocity of the expert's own path, a' x_0 + s' eps, per unit of its native time."""

    prediction: Prediction

    def __new__(cls, name: str, *prediction: Prediction) -> "PredictionType":
        """A member of two parts, so that its name alone finds it; type checkers see that call as well."""
        member = str.__new__(cls, name)
        member._value_ = name
        (member.prediction,) = prediction
        return member

    @classmethod
    def parse(cls, name: str) -> "PredictionType":
        """The member called ``name``; `HddmError` names those that exist."""
        for kind in cls:
            if kind == name:
                return kind
        names = [kind.value for kind in cls]
        raise HddmError(f"unknown prediction type {name!r}: {choose(name, names)}")


_NEGATED_BY_WORD = {PredictionType.EPSILON: True, PredictionType.V_PREDICTION: False}
"""What EDM's schedulers call a network of v, and whether it gives the negative, as EDM's own does."""


def from_edm(word: str) -> tuple[PredictionType, bool]:
    """What a network predicts that EDM's schedulers call ``word``, and whether it gives the negative of that.

    Raises:
        HddmError: for an unknown prediction type, or one that EDM does not have.
    """
    kind = PredictionType.parse(word)
    if kind not in _NEGATED_BY_WORD:
        raise HddmError(
            f"EDM's schedulers know the prediction types {PredictionType.EPSILON} (EDM's own network) and "
            f"{PredictionType.V_PREDICTION} (its negative), not {kind}"
        )
    return PredictionType.V_PREDICTION, _NEGATED_BY_WORD[kind]


def to_edm(kind: PredictionType, is_negated: bool) -> PredictionType | None:
    """The inverse of `from_edm`; None for what EDM's schedulers have no word for."""
    if kind is not PredictionType.V_PREDICTION:
        return None
    return next(word for word, negated in _NEGATED_BY_WORD.items() if negated == is_negated)
