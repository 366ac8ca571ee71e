"""Students of few steps: mean velocities of a teacher's flow, learned from its trajectories.

Through x_t a teacher's velocity leads to x_r at a time r < t. The mean velocity on the way is

    u(x_t, t, r) = (x_t - x_r)/(t - r),

so a step x_r = x_t - (t - r) u of any length is exact (MeanFlow, arXiv:2505.13447). A network learns u from
pairs (x_t, x_r) on trajectories of the teacher, solved from noise once and kept: a target that no network in
training has a part in (arXiv:2605.17834, its warm-up by discrete solutions). MeanFlow's own target, which
holds the derivative of the network, is not used: docs/notes/few-steps.md compares the two.

The loss of a sample is e/(e + c)^p, of its mean squared error e and without gradient in the denominator
(MeanFlow, section 4.2), as large errors are few.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hddm.condition_names import TEXT
from hddm.conditions import Conditions
from hddm.data.shards import TokenStore
from hddm.ensemble import Ensemble
from hddm.noise import Seeded
from hddm.predictions import PathPoint, Prediction
from hddm.sampling import integrate, plan
from hddm.times import beginner_of
from hddm.training.loader import StepInputs
from hddm.training.objectives import conditions_in
from hddm.training.settings import DistillRecipe
from hddm.utils.errors import HddmError, counted
from hddm.utils.files import write_whole
from hddm.utils.progress import Progress
from hddm.utils.streams import Use
from hddm.utils.tensors import append_dims, read_safetensors
from hddm.velocity import TIME_SCALE

GRID, SOLVED = 16, (0, 2, 4, 6, *range(8, 17))
"""Even steps of a grid of times, and its times at which the teacher is solved: more of them near the data."""
STUDENT_STEPS = (1, 2, 4)
"""Numbers of steps whose times are among those."""
OWN_STEPS = 0.5
"""Share of the pairs that are steps of the student; others are any two states."""
POWER, FLOOR = 0.5, 1e-3
"""Exponent p and constant c of the loss."""
_BATCH = 256
TRAJECTORIES_FILE = "trajectories.safetensors"
CAPTION = "caption"
"""Name, among a trajectory's conditions, of its caption's row in the tokens."""

log = logging.getLogger(__name__)


class Trajectories(NamedTuple):
    """States (N, T, C, H, W) of a teacher's flow, from noise to data, at ``times`` (T,) from 1 to 0."""

    states: Tensor
    times: Tensor


def trajectories_size(num: int, shape: tuple[int, ...]) -> int:
    """Bytes of the states of ``num`` trajectories of samples of a shape (C, H, W)."""
    return num * len(SOLVED) * torch.Size(shape).numel() * torch.float32.itemsize


@torch.no_grad()
def solve(
    teacher: Ensemble,
    num: int,
    seed: int,
    shape: tuple[int, ...],
    conditions: Mapping[str, Tensor],
    guidance_scale: float,
    file: Path | None = None,
    texts: TokenStore | None = None,
) -> Trajectories:
    """Solve ``num`` trajectories of the teacher from noise, or read those in ``file`` if they are the same.

    ``conditions`` (num,) are labels, `CAPTION` with its ``texts``, and ``expert`` unless the teacher mixes.
    They depend on ``seed`` alone.
    The file is one teacher's. Raises `HddmError` as `hddm.sampling.integrate`.
    """
    times = plan(teacher, steps=GRID).times[list(SOLVED)]
    ends = [beginner_of(teacher, k).end for k in range(len(teacher.experts))]
    known = {name: value.contiguous() for name, value in conditions.items()}
    numbers = [num, seed, guidance_scale, *times.tolist()]
    if min(ends) < 1:
        # They began with networks at t = 1 before there was a first step.
        numbers += ends
    known["numbers"] = torch.tensor(numbers, dtype=torch.float64)
    if file is not None and file.exists():
        kept = read_safetensors(file)
        states = kept.pop("states")
        if _are_equal(kept, known):
            log.info(
                "%s: %s of the teacher found", file, counted(num, "trajectory", "trajectories")
            )
            return Trajectories(states, times)
    states = torch.empty(num, len(times), *shape)
    with Progress(num * (len(times) - 1), "solve the teacher's trajectories") as progress:
        for rows in _alike(num, conditions.get("expert"), ends):
            x = Seeded(seed).initial(rows.tolist(), shape, Use.TRAJECTORY_NOISE)
            states[rows, 0] = x

            def keep(index: int, x: Tensor, rows: Tensor = rows) -> Tensor:
                states[rows, index + 1] = x.float().cpu()
                progress(len(rows))
                return x

            own = _at(rows, conditions, texts)
            expert = own.pop("expert", None)
            moved = {name: value.to(teacher.device) for name, value in own.items()}
            integrate(teacher, x, times, Conditions(moved), expert, keep, guidance=guidance_scale)
    if file is not None:
        write_whole(file, lambda path: save_file({"states": states, **known}, path))
    return Trajectories(states, times)


def _alike(num: int, expert: Tensor | None, ends: Sequence[float]) -> list[Tensor]:
    """Rows of ``num`` trajectories in batches, each of experts (num,) whose schedules have one end."""
    if expert is None:
        return list(torch.arange(num).split(_BATCH))
    own, found = torch.tensor(ends, dtype=torch.float64)[expert], []
    for end in own.unique().tolist():
        found += (own == end).nonzero()[:, 0].split(_BATCH)
    return found


def _are_equal(found: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> bool:
    """True if both have the same tensors under the same names."""
    if found.keys() != known.keys():
        return False
    return all(torch.equal(found[name], value) for name, value in known.items())


def _at(
    rows: Tensor, conditions: Mapping[str, Tensor], texts: TokenStore | None
) -> dict[str, Tensor]:
    """Conditions (n, …) of trajectories ``rows`` (n,), with tokens in place of captions."""
    own = {name: value[rows] for name, value in conditions.items()}
    if texts is not None:
        own[TEXT] = texts.take(own.pop(CAPTION))
    return own


@dataclass
class MeanFlow:
    """The training of a student of few steps; it provides `prepare`, `draw` and the loss of a `Task`.

    Args:
        teacher_on: the teacher on a device.
        prediction: what the network predicts, of mean velocities: x_0 = x_t - t u for ``sample``. All but
            those of noise, which are singular at t = 1.
        recipe: of the training, with its sampling steps, one of `STUDENT_STEPS`.
        shape: (C, H, W) of a sample.
        conditions: of the trajectories (N,): labels, captions, and the expert where each has one of its own.
        texts: tokens of the captions.
    """

    teacher_on: Callable[[torch.device], Ensemble]
    prediction: Prediction
    recipe: DistillRecipe
    shape: tuple[int, ...]
    conditions: Mapping[str, Tensor]
    texts: TokenStore | None = None

    def __post_init__(self) -> None:
        if self.prediction.is_of_noise:
            words = self.prediction.words
            raise HddmError(
                f"`sampling_steps`: a student of few steps cannot predict {words}, which does not determine "
                "x_0 at t = 1; begin with an expert of another `prediction`"
            )

    def prepare(self, device: torch.device, folder: Path | None) -> None:
        """Solve the teacher's trajectories on a device, or read them in the run's ``folder``."""
        recipe = self.recipe
        file = None if folder is None else folder / TRAJECTORIES_FILE
        of = (recipe.trajectories, recipe.seed, self.shape, self.conditions, recipe.guidance_scale)
        self._states, self._times = solve(self.teacher_on(device), *of, file, self.texts)

    def draw(self, rows: Tensor, noise: torch.Generator, own: slice) -> StepInputs:
        """Pairs of states ``x_t`` and ``x_r``, at ``t`` and ``r``, of trajectories ``rows``.

        Steps of the student, or any two.
        """
        num = len(rows)
        last_place = len(self._times) - 1
        steps = self.recipe.sampling_steps or 1
        first = torch.randint(last_place, (num,), generator=noise)
        last = first + 1 + (torch.rand(num, generator=noise) * (last_place - first)).long()
        ends = torch.tensor([SOLVED.index(GRID * k // steps) for k in range(steps + 1)])
        step = torch.randint(steps, (num,), generator=noise)
        is_own = torch.rand(num, generator=noise) < OWN_STEPS
        first = torch.where(is_own, ends[step], first)[own]
        last = torch.where(is_own, ends[step + 1], last)[own]
        mine = rows[own]
        return {
            "x_t": self._states[mine, first],
            "x_r": self._states[mine, last],
            "t": self._times[first],
            "r": self._times[last],
            **_at(mine, self.conditions, self.texts),
        }

    def loss(self, network: nn.Module, inputs: StepInputs) -> Tensor:
        """The loss (n,)."""
        x_t, t, r = inputs["x_t"], inputs["t"], inputs["r"]
        conditions = conditions_in(inputs)
        target = (x_t - inputs["x_r"]) / _wide(t - r, x_t)
        ahead = _wide(t, x_t)
        output = network(x_t, TIME_SCALE * t.to(x_t), **conditions, interval=(t - r).to(x_t))
        one = torch.ones_like(ahead)
        at = PathPoint(1 - ahead, ahead, lambda: (-one, one), x=x_t, y=x_t, t=ahead)
        u = self.prediction.velocity(output.float(), at)
        errors = (u.float() - target).square().flatten(1).mean(1)
        return errors / (errors.detach() + FLOOR) ** POWER


def _wide(times: Tensor, x: Tensor) -> Tensor:
    return append_dims(times, x.ndim).to(x)
