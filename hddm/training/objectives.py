"""Training objectives, and the images, noise, times and conditions of an expert's step.

One family: a network predicts p from y = alpha_u z + sigma_u eps at native time u, where z are the images
in its own units (`hddm.units`), by default x_0 itself, and learns

    E_u  w(u) || network(y, u) - p ||²

If both objectives predict x_0 (``sample``), their losses and noise levels are equal, and only the scale of y
differs. By default they differ in prediction, weighting, noise levels and path.

| objective | path | p: those of `hddm.predictions`, by default |
|---|---|---|
| ddpm | cosine, or one of diffusers', EDM's too | epsilon; all but flow_prediction |
| flow | linear | sample |

| noise levels | u |
|---|---|
| uniform | uniform in native time: the default of ddpm, unless it predicts x_0 |
| logit-normal | the logit of t = sigma/(alpha + sigma) is normal (SD3, arXiv:2403.03206, section 3.1) |

An expert for a noise range (low <= t < high; a high of 1 is included) draws t from the same distribution,
conditioned on the range: within it, noise levels are as frequent, relative to each other, as in a training on
all of t.

| weighting | w |
|---|---|
| prediction | 1; for predictions of noise min(SNR, gamma)/SNR with a gamma (arXiv:2303.09556) |
| velocity | makes it the error of the velocity: `hddm.predictions.Prediction.velocity_weights` |
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hddm.condition_names import LABELS, TEXT
from hddm.conversion import derivatives_at
from hddm.data.shards import Shard
from hddm.predictions import Level, Prediction, PredictionType
from hddm.schedules import CosineSchedule, DiscreteSchedule, LinearSchedule, Schedule
from hddm.training.loader import Draw, StepInputs
from hddm.training.settings import ExpertRecipe
from hddm.units import Units
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.records import WHOLE
from hddm.utils.tensors import append_dims
from hddm.velocity import TIME_SCALE


@dataclass(frozen=True)
class Objective:
    """A prediction that a network learns on a path; weighting and noise levels are the ``recipe``'s.

    ``schedule`` is linear for flow and for flow_prediction; else `UsageError` is raised. ``snr_gamma`` has an
    effect for predictions of noise alone.
    """

    recipe: ExpertRecipe
    schedule: Schedule
    prediction_type: PredictionType
    units: Units = field(default_factory=Units)
    """Those of the expert that goes on; the schedule may have a scale of its own besides."""

    def __post_init__(self) -> None:
        is_flow = self.prediction.is_velocity or self.recipe.objective == "flow"
        if is_flow and not isinstance(self.schedule, LinearSchedule):
            text = "`schedule` is for DDPM, and `prediction` flow_prediction for flow matching"
            raise UsageError(f"{text}; use another `objective`, or leave it out")

    @property
    def prediction(self) -> Prediction:
        """What the network learns to predict."""
        return self.prediction_type.prediction

    @property
    def path_units(self) -> Units:
        """Units of the data z that are noised: the network sees a z + s eps."""
        return self.units.times(self.schedule.data_scale)

    @property
    def time_scale(self) -> float:
        """The factor on native time for the network: 1000 but for the steps of a discrete schedule."""
        return 1.0 if isinstance(self.schedule, DiscreteSchedule) else TIME_SCALE

    def errors(
        self,
        network: Callable[..., Tensor],
        x_0: Tensor,
        eps: Tensor,
        time: Tensor,
        conditions: Mapping[str, Tensor],
    ) -> Tensor:
        """Return squared errors (batch,), averaged over each sample's elements and weighted.

        ``network`` is one of (y, timestep, **conditions), ``x_0`` are clean samples (batch, C, H, W), ``eps``
        noise like them, and ``time`` native times (batch,), float64.
        """
        signal, noise = self.schedule.alpha_sigma(time)

        def wide(values: Tensor) -> Tensor:
            return append_dims(values, x_0.ndim).to(x_0)

        at = Level(wide(signal), wide(noise), derivatives_at(self.schedule, time, wide))
        timestep = (time * self.time_scale).to(x_0.device, torch.float32)
        z = self.path_units.own(x_0)
        output = network(at.alpha * z + at.sigma * eps, timestep, **conditions)
        errors = self.prediction.error(output, z, eps, at).square().flatten(1).mean(1)
        weights = self._weights(signal, noise)
        return errors if weights is None else errors * weights.to(errors)

    def _weights(self, alpha: Tensor, sigma: Tensor) -> Tensor | None:
        """The weights w (batch,) at signal and noise scales (batch,); None if all are 1."""
        if self.recipe.weighting == "velocity":
            return self.prediction.velocity_weights(alpha, sigma, self.path_units.scale)
        gamma = self.recipe.snr_gamma
        if gamma is None or not self.prediction.is_of_noise:
            return None
        return (gamma * (sigma / (alpha * self.path_units.scale)).square()).clamp(max=1)

    def common_time(self, time: Tensor) -> Tensor:
        """Convert native times (batch,) to the common path: sigma/(alpha d + sigma), in [0, 1]."""
        alpha, sigma = self.schedule.alpha_sigma(time)
        return sigma / (alpha * self.path_units.scale + sigma)

    def sample_times(self, num: int, noise: torch.Generator) -> Tensor:
        """Draw native times (num,), float64: whole indices for a discrete schedule."""
        first, last = self._native
        is_discrete = isinstance(self.schedule, DiscreteSchedule)
        if self.recipe.time_sampling == "logit-normal":
            native = self._match(self._logit_normal(num, noise))
            return native.round().clamp(first, last) if is_discrete else native
        if is_discrete:
            return torch.randint(int(first), int(last) + 1, (num,), generator=noise).double()
        return first + (last - first) * torch.rand(num, generator=noise, dtype=torch.float64)

    @functools.cached_property
    def _native(self) -> tuple[float, float]:
        """First and last native time of the noise range; whole indices of a discrete schedule."""
        low, high = part = self.recipe.noise_range
        if part == WHOLE:
            return self.schedule.start, self.schedule.end
        if not isinstance(self.schedule, DiscreteSchedule):
            first, last = self._match(torch.tensor(part, dtype=torch.float64)).tolist()
            return first, last
        t = self.common_time(torch.arange(self.schedule.end + 1, dtype=torch.float64))
        last = self.schedule.end if high == 1 else float((t < high).sum()) - 1
        return float((t < low).sum()), last

    def _match(self, t: Tensor) -> Tensor:
        """Native times of ``t`` on the common path."""
        return self.schedule.match(t, self.path_units.scale)

    def _logit_normal(self, num: int, noise: torch.Generator) -> Tensor:
        """Draw t (num,) of the noise range, or of all that is rounded to an index in it."""
        low, high = self.recipe.noise_range
        if isinstance(self.schedule, DiscreteSchedule):
            first, last = self._native
            scale = self.path_units.scale
            low, high = 0.0, 1.0
            if first > 0:
                low = self.schedule.common_time(first - 0.5, scale)
            if last < self.schedule.end:
                high = self.schedule.common_time(last + 0.5, scale)
        if (low, high) == WHOLE:
            return torch.sigmoid(torch.randn(num, generator=noise, dtype=torch.float64))
        # The inverse of the distribution function, between its values at both ends.
        start, stop = torch.special.ndtr(torch.tensor([low, high], dtype=torch.float64).logit())
        uniform = torch.rand(num, generator=noise, dtype=torch.float64)
        t: Tensor = torch.special.ndtri(start + (stop - start) * uniform).sigmoid().clamp(low, high)
        return t


def objective_of(
    recipe: ExpertRecipe,
    schedule: Schedule | None = None,
    learned: PredictionType | None = None,
    units: Units | None = None,
) -> Objective:
    """Return the objective of ``recipe``, on ``schedule`` or by default the linear path or DDPM's cosine one.

    What is ``learned`` is by default what the network predicts, on data in the ``units`` of the shard.

    Raises:
        HddmError: as `Objective`.
    """
    default: Schedule = CosineSchedule() if recipe.objective == "ddpm" else LinearSchedule()
    predicts = learned or PredictionType(recipe.prediction)
    return Objective(recipe, schedule or default, predicts, units or Units())


_DRAWN = ("x_0", "eps", "time", "t")


def drawing(
    shard: Shard,
    objective: Objective,
    recipe: ExpertRecipe,
    given: Mapping[str, Tensor],
    nulls: Mapping[str, Tensor],
) -> Draw:
    """Return the function that draws the inputs of a step (`hddm.training.loop.Task.draw`).

    With probability ``recipe.condition_dropout`` a sample has null values for all its conditions at once,
    as guidance calls the network. ``given`` are conditions (N, …) of all samples, by keyword, without tokens,
    which come from the shard; ``nulls`` are null values without batch dimension.
    """

    def draw(rows: Tensor, noise: torch.Generator, own: slice) -> StepInputs:
        number = len(rows)
        mine = rows[own]
        flip = torch.rand(number, generator=noise) < 0.5 if recipe.random_flip else None
        x_0 = shard.take(rows, noise, flip, own)
        time = objective.sample_times(number, noise)[own]
        eps = torch.randn(number, *shard.shape, generator=noise)[own]
        conditions = {name: value[mine] for name, value in given.items()}
        if recipe.text_conditional and shard.texts is not None:
            conditions[TEXT] = shard.texts.take(mine)
        dropped = (torch.rand(number, generator=noise) < recipe.condition_dropout)[own]
        for name in set(conditions) & set(nulls):
            value = conditions[name]
            where = append_dims(dropped, value.ndim)
            conditions[name] = torch.where(where, nulls[name].to(value.dtype), value)
        return {
            "x_0": x_0,
            "eps": eps,
            "time": time,
            "t": objective.common_time(time),
            **conditions,
        }

    return draw


def conditions_in(inputs: StepInputs) -> dict[str, Tensor]:
    """Return the labels and the tokens of captions among the inputs of a step."""
    return {name: inputs[name] for name in (LABELS, TEXT) if name in inputs}


def loss_of(
    objective: Objective, predict: Callable[..., Callable[..., Tensor]]
) -> Callable[[nn.Module, StepInputs], Tensor]:
    """Return the loss on inputs of `drawing`; ``predict(network)`` takes (y, timestep, **conditions)."""

    def loss(network: nn.Module, inputs: StepInputs) -> Tensor:
        conditions = {name: value for name, value in inputs.items() if name not in _DRAWN}
        return objective.errors(
            predict(network), inputs["x_0"], inputs["eps"], inputs["time"], conditions
        )

    return loss


def check_conditions(shard: Shard, recipe: ExpertRecipe) -> None:
    """Refuse conditions, held-out images or flips that ``shard`` does not allow; errors name what to drop."""
    problems = []
    if recipe.class_conditional and shard.labels is None:
        problems.append("its images carry no labels; drop `class_conditional=True`")
    if recipe.text_conditional and shard.texts is None:
        problems.append(
            "holds no text embeddings; hddm encode makes them, or drop `text_conditional=True`"
        )
    if shard.held_out_of is not None:
        problems.append("holds images kept for evaluation; train on its shard")
    if problems:
        raise HddmError(f"{shard.folder}: {problems[0]}", problems[1:])
    if recipe.random_flip:
        # Latents can be mirrored only where mirror images were encoded too; else this raises.
        shard.take(torch.zeros(1, dtype=torch.long), flip=torch.ones(1, dtype=torch.bool))
