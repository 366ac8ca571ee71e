"""Calls of networks, counted before samples are drawn, against those of the run itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hddm.call_counts import ROUTER, count_calls
from hddm.conditions import Conditions
from hddm.editing import Picture
from hddm.ensemble import Ensemble, Part
from hddm.guidance import Guidance
from hddm.running import run
from hddm.sampling import batches, plan
from hddm.schedules import LinearSchedule, from_diffusers
from hddm.solvers import SOLVERS
from hddm.velocity import VelocityField

SHAPE = (1, 2, 2)
NUM = 10
PROBABILITIES = torch.tensor([0.5, 0.3, 0.2])


class Counted:
    """A network whose samples are counted."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        self.rows.append(len(x))
        return x / 2


class Router:
    """Gives the same probabilities to all states, which are counted."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.rows += len(x)
        return PROBABILITIES.expand(len(x), -1)


def field(predicts: str = "flow_prediction", schedule: Any = None, **options: Any) -> VelocityField:
    return VelocityField(
        Counted(),
        schedule or LinearSchedule(),
        predicts,
        conditions=("class_labels",),
        null_conditions={"class_labels": torch.tensor(0)},
        sample_shape=SHAPE,
        **options,
    )


def with_weak() -> VelocityField:
    return field(weak=field())


def ddpm() -> VelocityField:
    """Ends below t = 1, where its first call is for the mean of the data."""
    config = {"_class_name": "DDPMScheduler", "num_train_timesteps": 1000, "beta_start": 1e-4}
    config |= {"beta_end": 0.02, "beta_schedule": "linear"}
    return field("epsilon", from_diffusers(config))


def three(make: Callable[[], VelocityField] = field, strategy: str = "full") -> Ensemble:
    return Ensemble([make() for _ in range(3)], Router(), strategy, prior=[1, 2, 3])


def counted(model: Ensemble, size: int = 4, **options: Any) -> tuple[int, int, int]:
    """The least and greatest number of samples through networks that are foretold, and the real one."""
    how = plan(model, **options)
    conditions = Conditions({"class_labels": torch.zeros(NUM, dtype=torch.long)})
    listed = list(batches(how, range(NUM), conditions, size))
    least, greatest = count_calls(how, listed)
    networks = networks_of(model)
    assert not any(one.rows for one in networks), "counting ran a network"
    for batch in listed:
        run(how, batch)
    if model.router is not None and least == greatest:
        assert greatest.of_router == model.router.rows
    largest = max(max(one.rows) for one in networks if one.rows)
    assert max(v for k, v in greatest.largest.items() if k != ROUTER) >= largest
    return least.of_experts, greatest.of_experts, sum(sum(one.rows) for one in networks)


def networks_of(model: Ensemble) -> list[Any]:
    networks = [one.network for one in model.experts]
    return networks + [one.weak.network for one in model.experts if one.weak is not None]


GUIDANCE = {
    "none": Guidance(1.0),
    "condition": Guidance(2.0),
    "in a part": Guidance(2.0, interval=(0.2, 0.6)),
    "weak": Guidance(2.0, by="weak"),
}


@pytest.mark.parametrize("guidance", list(GUIDANCE))
@pytest.mark.parametrize("solver", list(SOLVERS))
@pytest.mark.parametrize("strategy", ["full", "top-2", "draw", "commit-0.5"])
def test_foretold_calls_are_those_of_the_run(strategy: str, solver: str, guidance: str) -> None:
    options = {"solver": solver, "guidance": GUIDANCE[guidance], "steps": 7}
    least, greatest, real = counted(three(with_weak, strategy), **options)
    assert least == greatest == real > 0


@pytest.mark.parametrize("guidance", list(GUIDANCE))
@pytest.mark.parametrize(
    "strategy", ["nucleus-0.7", "nucleus-0.9", "threshold-0.25", "threshold-1"]
)
def test_what_the_router_decides_lies_between_the_least_and_the_greatest(
    strategy: str, guidance: str
) -> None:
    model = three(with_weak, strategy)
    least, greatest, real = counted(model, guidance=GUIDANCE[guidance], steps=5)
    assert 0 < least <= real <= greatest
    chosen = int((PROBABILITIES > 0.25).sum()) if strategy == "threshold-0.25" else None
    assert chosen is None or real == chosen * least


@pytest.mark.parametrize("strategy", ["full", "draw"])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_a_call_for_the_mean_of_the_data_counts(strategy: str, steps: int) -> None:
    least, greatest, real = counted(three(ddpm, strategy), steps=steps)
    assert least == greatest == real


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_students_of_few_steps_take_their_own(steps: int) -> None:
    model = Ensemble([field(sampling_steps=steps)], None, "draw")
    assert counted(model) == (steps * NUM,) * 3


def test_a_pair_by_noise_runs_one_expert_at_a_time() -> None:
    def part(noise_range: tuple[float, float], domain: str) -> Part:
        return Part(field(noise_range=noise_range), domain=domain)

    parts = [part((0.5, 1.0), "a"), part((0.0, 0.5), "a"), Part(field(), domain="b")]
    for strategy in ("full", "draw", "commit-0.5"):
        model = Ensemble(parts, Router(), strategy)
        for one in parts:
            one.field.network.rows.clear()
        least, greatest, real = counted(model, steps=6)
        assert least == greatest == real


@pytest.mark.parametrize("options", [{"expert": 1}, {"router_every": 3}, {"steps": 30}], ids=str)
def test_other_options_count_too(options: dict[str, Any]) -> None:
    least, greatest, real = counted(three(), **options)
    assert least == greatest == real


@pytest.mark.parametrize("masked", [False, True])
def test_a_picture_shortens_and_a_mask_repeats_the_steps(masked: bool) -> None:
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool) if masked else None
    picture = Picture(torch.zeros(1, *SHAPE), 0.6, mask, 3 if masked else None)
    solver = "euler" if masked else None
    found = counted(three(strategy="full"), steps=10, solver=solver, picture=lambda k: picture)
    assert found[0] == found[1] == found[2]
    assert (found[2] < 30 * NUM) is not masked
