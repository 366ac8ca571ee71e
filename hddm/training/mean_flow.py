"""Students of few steps: mean velocities of a teacher's flow, learned from its trajectories and by MeanFlow.

Through x_t a teacher's velocity v leads to x_r at a time r < t. The mean velocity on the way is

    u(x_t, t, r) = (x_t - x_r)/(t - r),        u(x_t, t, t) = v(x_t, t),

so a step x_r = x_t - (t - r) u of any length is exact. A network learns u in one stage; students of one step
have a second:

1. From (x_t, x_r) on trajectories of the teacher, solved from noise once and kept: a target that no network
   in training has a part in (arXiv:2605.17834, its warm-up by discrete solutions).
2. For a part of the samples by the MeanFlow identity (arXiv:2505.13447, equation 6), at any t and r,

       u = v - (t - r) du/dt,        du/dt = v ∂u/∂x + ∂u/∂t,        r held,

   with the derivative of the network's averaged weights, taken forwards and without gradient. Its length is
   bounded: what it says of a network that is still coarse would grow from step to step.

The loss of a sample is e/(e + c)^p, of its mean squared error e and without gradient in the denominator
(ibid., section 4.2), as large errors are few.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hddm.conditions import LABELS, Conditions
from hddm.ensemble import Ensemble
from hddm.running import Seeded
from hddm.sampling import integrate, plan
from hddm.training.loop import Inputs
from hddm.training.objectives import TIME_SCALE
from hddm.training.settings import DistillRecipe
from hddm.utils.errors import HddmError, counted
from hddm.utils.files import write_whole
from hddm.utils.progress import Progress
from hddm.utils.streams import Use
from hddm.utils.tensors import append_dims, read_safetensors
from hddm.velocity import PathPoint, PredictionType, velocity

SOLVED, KEPT = 24, 8
"""Steps of the teacher's solver along a trajectory, and the intervals between the states that are kept."""
STUDENT_STEPS = (1, 2, 4)
"""Numbers of steps whose times are among the states that are kept."""
SECOND_STAGE = 0.75
"""Share of the steps after which the second stage of a student of one step begins; others have none."""
BY_IDENTITY, INSTANTANEOUS, OWN_STEPS = 0.5, 0.25, 0.5
"""Shares: by the identity in the second stage; r = t among those; steps of the student among pairs."""
LONGEST = 0.5
"""Bound of the identity's second term, in sizes of v and noise together."""
POWER, FLOOR = 0.5, 1e-3
"""Exponent p and constant c of the loss."""
_BATCH = 256
FILE = "trajectories.safetensors"

log = logging.getLogger(__name__)

MeanVelocity = Callable[[Tensor, Tensor, Tensor], Tensor]
"""u of states (n, C, H, W) at times t (n,), over intervals t - r (n,)."""


class Trajectories(NamedTuple):
    """States (N, `KEPT` + 1, C, H, W) of a teacher's flow, from noise to data, at ``times`` from 1 to 0."""

    states: Tensor
    times: Tensor


@torch.no_grad()
def solve(
    teacher: Ensemble,
    num: int,
    seed: int,
    shape: tuple[int, ...],
    conditions: Mapping[str, Tensor],
    guidance_scale: float,
    file: Path | None = None,
) -> Trajectories:
    """Solve ``num`` trajectories of the teacher from noise, or read those in ``file`` if they are the same.

    ``conditions`` (num,) are labels, and ``expert`` unless the teacher mixes. They depend on ``seed`` alone.
    The file is one teacher's. Raises `HddmError` as `hddm.sampling.integrate`.
    """
    fine = plan(teacher, steps=SOLVED).times
    stride = SOLVED // KEPT
    times = fine[::stride]
    known = {name: value.contiguous() for name, value in conditions.items()}
    known["numbers"] = torch.tensor([num, seed, guidance_scale], dtype=torch.float64)
    if file is not None and file.exists():
        kept = read_safetensors(file)
        states = kept.pop("states")
        if kept.keys() == known.keys() and all(torch.equal(kept[name], one) for name, one in known.items()):
            log.info("%s: %s of the teacher found", file, counted(num, "trajectory", "trajectories"))
            return Trajectories(states, times)
    states = torch.empty(num, KEPT + 1, *shape)
    with Progress(num * SOLVED, "solve the teacher's trajectories") as progress:
        for rows in torch.arange(num).split(_BATCH):
            x = Seeded(seed).initial(rows.tolist(), shape, Use.TRAJECTORY_NOISE)
            states[rows, 0] = x

            def keep(index: int, x: Tensor, rows: Tensor = rows) -> Tensor:
                if (index + 1) % stride == 0:
                    states[rows, (index + 1) // stride] = x.float().cpu()
                progress(len(rows))
                return x

            own = {name: value[rows].to(teacher.device) for name, value in conditions.items()}
            expert = own.pop("expert", None)
            integrate(teacher, x, fine, Conditions(own), expert, keep, guidance=guidance_scale)
    if file is not None:
        write_whole(file, lambda path: save_file({"states": states, **known}, path))
    return Trajectories(states, times)


@dataclass
class MeanFlow:
    """The training of a student of few steps; it provides `prepare`, `draw` and the losses of a `Task`.

    Args:
        teacher_on: the teacher on a device.
        prediction: what the network predicts, of mean velocities: x_0 = x_t - t u for ``sample``. All but
            epsilon, which is singular at t = 1 (`hddm.velocity.velocity`).
        recipe: of the training, with its sampling steps, one of `STUDENT_STEPS`.
        shape: (C, H, W) of a sample.
        conditions: of the trajectories (N,): labels, and the expert where each has one of its own.
    """

    teacher_on: Callable[[torch.device], Ensemble]
    prediction: PredictionType
    recipe: DistillRecipe
    shape: tuple[int, ...]
    conditions: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        self.teacher_on = functools.cache(self.teacher_on)
        if self.prediction is PredictionType.EPSILON:
            text = "a student of few steps cannot predict noise, which does not determine x_0 at t = 1"
            raise HddmError(f"`sampling_steps`: {text}; begin with an expert of another `prediction`")

    def prepare(self, device: torch.device, folder: Path | None) -> None:
        """Solve the teacher's trajectories on a device, or read them in the run's ``folder``."""
        recipe, file = self.recipe, None if folder is None else folder / FILE
        teacher, scale = self.teacher_on(device), recipe.guidance_scale
        found = solve(teacher, recipe.trajectories, recipe.seed, self.shape, self.conditions, scale, file)
        self._states, self._times = found

    def draw(self, rows: Tensor, noise: torch.Generator, own: slice) -> Inputs:
        """Pairs of states of trajectories ``rows``, and for the identity noised ends of them.

        ``x_t`` and ``x_r`` at ``t`` and ``r`` are half steps of the student, half any two. ``x_0``, ``eps``,
        ``end`` and ``start``, the times of the identity, are for the samples in ``by_identity``.
        """
        num, times, steps = len(rows), self._times, self.recipe.sampling_steps or 1
        first = torch.randint(KEPT, (num,), generator=noise)
        last = first + 1 + (torch.rand(num, generator=noise) * (KEPT - first)).long()
        stride = KEPT // steps
        step = torch.randint(steps, (num,), generator=noise)
        is_own = torch.rand(num, generator=noise) < OWN_STEPS
        first = torch.where(is_own, step * stride, first)
        last = torch.where(is_own, (step + 1) * stride, last)
        start, end = torch.rand(num, 2, generator=noise, dtype=torch.float64).sort(1, descending=True)[0].T
        is_now = torch.rand(num, generator=noise) < INSTANTANEOUS
        by_identity = torch.rand(num, generator=noise) < BY_IDENTITY
        eps = torch.randn(num, *self.shape, generator=noise)[own]
        mine = rows[own]
        return {
            "x_t": self._states[mine, first[own]],
            "x_r": self._states[mine, last[own]],
            "t": times[first[own]],
            "r": times[last[own]],
            "x_0": self._states[mine, -1],
            "eps": eps,
            "start": start[own],
            "end": torch.where(is_now, start, end)[own],
            "by_identity": by_identity[own],
            **{name: value[mine] for name, value in self.conditions.items()},
        }

    def loss(
        self, network: nn.Module, inputs: Inputs, averages: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The loss (n,); with ``averages``, whose derivative the identity takes, that of the second stage."""
        x_t, t, r = inputs["x_t"], inputs["t"], inputs["r"]
        conditions: dict[str, Any] = {LABELS: inputs[LABELS]} if LABELS in inputs else {}
        target = (x_t - inputs["x_r"]) / _wide(t - r, x_t)
        if averages is not None and len(rows := inputs["by_identity"].nonzero()[:, 0]):
            start, end = inputs["start"][rows], inputs["end"][rows]
            ahead = _wide(start, x_t)
            states = (1 - ahead) * inputs["x_0"][rows] + ahead * inputs["eps"][rows]
            own = {name: value[rows] for name, value in conditions.items()}
            expert = None if "expert" not in inputs else inputs["expert"][rows]
            with torch.no_grad(), torch.autocast(x_t.device.type, enabled=False):
                teacher, scale = self.teacher_on(x_t.device), self.recipe.guidance_scale
                v = teacher.velocity(states, start, scale, expert=expert, **own)
                averaged = self.mean_velocity(functools.partial(_call, network, averages), own)
                found = identity_target(averaged, states, v, start, end, LONGEST)
            x_t, target = x_t.index_copy(0, rows, states), target.index_copy(0, rows, found.to(target))
            t, r = t.index_copy(0, rows, start), r.index_copy(0, rows, end)
        u = self.mean_velocity(network, conditions)(x_t, t, t - r)
        errors = (u.float() - target).square().flatten(1).mean(1)
        return errors / (errors.detach() + FLOOR) ** POWER

    def mean_velocity(self, network: Callable[..., Tensor], conditions: Mapping[str, Tensor]) -> MeanVelocity:
        """The network's u under ``conditions``."""

        def u(x_t: Tensor, t: Tensor, interval: Tensor) -> Tensor:
            time, ahead = t.to(x_t), _wide(t, x_t)
            output = network(x_t, TIME_SCALE * time, **conditions, interval=interval.to(x_t))
            at = PathPoint(
                x_t, x_t, ahead, 1 - ahead, ahead, lambda: (-torch.ones_like(ahead), torch.ones_like(ahead))
            )
            return velocity(self.prediction, output.float(), at)

        return u


def identity_target(
    u: MeanVelocity, x_t: Tensor, v: Tensor, t: Tensor, r: Tensor, bound: float = torch.inf
) -> Tensor:
    """What the MeanFlow identity gives for the mean velocity from t to r: v - (t - r) du/dt.

    The second term is shortened where it is longer than ``bound`` times v and noise together, root mean
    squares over a sample. It is exact for the u of the flow of v alone. Times are (n,), the rest
    (n, C, H, W).
    """
    at, over = t.to(x_t), (t - r).to(x_t)
    # Compiled blocks have no derivative forwards, nor have the other kernels of attention.
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
        slope: Tensor = torch.func.jvp(u, (x_t, at, over), (v, torch.ones_like(at), torch.ones_like(over)))[1]
    term = _wide(t - r, x_t) * slope
    longest = bound * (_size(v) + 1)
    limit = longest / _size(term).clamp(min=1e-12)
    target: Tensor = v - append_dims(limit.clamp(max=1), x_t.ndim) * term
    return target


def _size(x: Tensor) -> Tensor:
    return x.flatten(1).square().mean(1).sqrt()


def _call(
    network: nn.Module, averages: Mapping[str, Tensor], *inputs: Tensor, **conditions: Tensor
) -> Tensor:
    """``network`` with the ``averages`` for its parameters."""
    output: Tensor = torch.func.functional_call(network, dict(averages), inputs, conditions)
    return output


def _wide(times: Tensor, x: Tensor) -> Tensor:
    return append_dims(times, x.ndim).to(x)
