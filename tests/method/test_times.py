"""The first step of samples, to the end of the experts' schedules, and calls of networks, all below it."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hddm.calibration import Calibration, Moments
from hddm.conditions import Conditions
from hddm.editing import Picture
from hddm.ensemble import Ensemble
from hddm.guidance import Guidance
from hddm.noise import Latents, Seeded
from hddm.running import Batch, run
from hddm.sampling import batches, integrate, plan, sample
from hddm.schedules import EDMSchedule, LinearSchedule
from hddm.solvers import SOLVERS
from hddm.times import beginner_of, first_step, mean_seen, time_grid
from hddm.training.mean_flow import GRID, SOLVED, solve
from hddm.velocity import VelocityField
from tests.artefacts import refusal
from tests.cases import LINEAR, Case, case_named, in_parts, oracle_field
from tests.oracles import GaussianMixture, exact_router

SHAPE = (1, 2, 2)
GAUSSIAN = GaussianMixture.random(seed=5, modes=1, dim=4, spread=2.0)
SHARDS = [GaussianMixture.random(seed=20 + k, modes=2, dim=4) for k in range(3)]
PRIOR = [0.2, 0.5, 0.3]
SD, DDPM = case_named("sd-scaled-linear"), case_named("ddpm-linear")
ZERO_SNR = case_named("sd-scaled-linear-ztsnr")
SD_END = SD.schedule.range[1]
CALLS = {"euler": 1, "heun": 2, "adams-moulton": 1}


def _moments(shard: GaussianMixture, class_means: Tensor | None = None) -> Moments:
    values, vectors = torch.linalg.eigh(shard.covariance)
    return Moments(shard.mean, vectors, torch.cat([values, torch.ones(1).double()]), class_means)


def _calibration(shard: GaussianMixture, class_means: Tensor | None = None) -> Calibration:
    """Moments whose weight is 0 below t = 1, so that the network is left as it is."""
    weights = torch.zeros(3, 5)
    weights[-1] = 1
    return Calibration(_moments(shard, class_means), torch.tensor([0, 0.999999, 1]), weights)


class Counted(VelocityField):
    """An expert that keeps at which t its velocity was asked for, in calls."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.asked: list[float] = []
        self.states: list[Tensor] = []

    def guided(self, x_t: Tensor, times: Tensor, *more: Any) -> Tensor:
        assert (times == times[0]).all()
        self.asked.append(float(times[0]))
        self.states.append(x_t)
        return super().guided(x_t, times, *more)


def _counted(shard: GaussianMixture, case: Case = SD, **options: Any) -> Counted:
    kind = "flow_prediction" if case is LINEAR else "epsilon"
    known = oracle_field(shard, case, kind)
    return Counted(known.network, case.schedule, kind, sample_shape=SHAPE, **options)


def _ensemble(strategy: str, cases: Sequence[Case] = (SD, DDPM, LINEAR)) -> Ensemble:
    fields = [_counted(shard, case) for shard, case in zip(SHARDS, cases, strict=True)]
    return Ensemble(fields, exact_router(SHARDS, PRIOR), strategy, PRIOR)


def _exact(shard: GaussianMixture, x: Tensor, s: float, t: float) -> Tensor:
    """The flow of a Gaussian by its definition: deviations from the mean keep their number of deviations."""
    root = [_root((1 - time) ** 2 * shard.covariance + time**2 * torch.eye(4)) for time in (s, t)]
    away = x.double().flatten(1) - (1 - s) * shard.mean
    flown = away @ torch.linalg.inv(root[0]) @ root[1] + (1 - t) * shard.mean
    return flown.view_as(x)


def _root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.sqrt()) @ vectors.T


@pytest.mark.parametrize(("s", "t"), [(1.0, 0.936), (0.97, 0.5), (0.4, 0.9), (1.0, 0.0)])
def test_the_flow_of_the_moments_is_that_of_a_gaussian_and_of_their_velocity(
    s: float, t: float
) -> None:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    means = torch.randn(3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    known, labels = _moments(GAUSSIAN, means), torch.arange(50) % 4
    torch.testing.assert_close(known.flow(x, s, t), _exact(GAUSSIAN, x, s, t))

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        return known.velocity(x, now.expand(len(x)), labels)

    times = torch.linspace(s, t, 400, dtype=torch.float64)
    solved = SOLVERS["heun"](velocity, x, times)
    torch.testing.assert_close(known.flow(x, s, t, labels), solved, atol=1e-4, rtol=1e-4)


def test_variance_and_means_of_classes_count_in_the_first_step() -> None:
    wide = Moments(torch.zeros(2), torch.eye(2), torch.tensor([100.0, 0.01, 1.0]), torch.ones(1, 2))
    moved = wide.flow(torch.ones(1, 2), 1.0, 0.936)
    torch.testing.assert_close(moved, torch.tensor([[1.133, 0.936]]), atol=1e-3, rtol=0)
    of_class = wide.flow(torch.ones(1, 2), 1.0, 0.936, torch.tensor([0]))
    torch.testing.assert_close(of_class - moved, torch.full((1, 2), 0.064))


@pytest.mark.parametrize("shift", [1.0, 0.3, 3.0, 1.7])
@pytest.mark.parametrize("first", [1.0, 0.936, 0.5])
def test_the_grid_below_a_first_time_has_the_density_of_the_whole_one(
    shift: float, first: float
) -> None:
    grid = time_grid(10, shift, first)
    assert (len(grid), grid[0], grid[-1]) == (11, first, 0) or first == 1
    u = grid / (shift - (shift - 1) * grid)
    even = torch.full((10,), float(u[0]) / 10, dtype=torch.float64)
    torch.testing.assert_close(-u.diff(), even)


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("solver", list(CALLS))
@pytest.mark.parametrize("case", [SD, DDPM, ZERO_SNR], ids=lambda case: case.name)
def test_all_calls_of_one_expert_lie_inside_its_schedule(
    case: Case, solver: str, calibrated: bool
) -> None:
    field = _counted(GAUSSIAN, case, calibration=_calibration(GAUSSIAN) if calibrated else None)
    sample(field, 3, steps=10, solver=solver)
    # Without a calibration, one step is the call that asks for the mean.
    others = 10 if calibrated else 9
    assert len(field.asked) == others * CALLS[solver] + (10 - others)
    end = field.range[1] if calibrated else min(field.range[1], 0.95)
    assert field.asked[0] == max(field.asked) == end < 1
    assert len({*field.asked}) >= others
    # None of them is one that the schedule's end stands in for.
    fed = [time.unique() for _, time in field.network.fed]
    assert len(torch.cat(fed).unique()) >= others


def test_an_expert_begins_at_its_schedules_last_time_and_of_edm_at_its_largest_sigma() -> None:
    schedule = EDMSchedule(sigma_max=10.0)
    field = VelocityField(lambda x, t: x, schedule, "v_prediction", sample_shape=SHAPE)
    assert field.end == pytest.approx(10 / 11)
    assert pytest.approx(SD.common_time(999)) == SD_END
    assert plan(field).beginning_of() == (field.end, True)


@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
def test_a_network_that_covers_all_noise_begins_there(prediction: str) -> None:
    zero = oracle_field(GAUSSIAN, ZERO_SNR, prediction, sample_shape=SHAPE)
    cosine = oracle_field(GAUSSIAN, case_named("cosine"), "epsilon", sample_shape=SHAPE)
    assert zero.end == cosine.end == 1
    assert plan(cosine).beginning_of() == (1, False)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("solver", list(CALLS))
def test_experts_of_all_noise_keep_their_grid_and_every_bit(solver: str, shift: float) -> None:
    field = oracle_field(GAUSSIAN, sample_shape=SHAPE)
    noise = Seeded(4).initial(range(5), SHAPE)

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        return field.velocity(x, now)

    u = torch.linspace(1, 0, 8, dtype=torch.float64)
    plain = SOLVERS[solver](velocity, noise, shift * u / (1 + (shift - 1) * u))
    assert torch.equal(sample(field, 5, 4, 7, solver=solver, shift=shift), plain)


def test_gaussian_data_are_exact_up_to_the_solver_and_noise_alone_is_the_step_without_moments() -> (
    None
):
    x = torch.randn(20, *SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    known = oracle_field(GAUSSIAN, SD, "epsilon", sample_shape=SHAPE)
    known.calibration = _calibration(GAUSSIAN)
    alone = Ensemble([known], strategy="draw")
    expert, one = torch.zeros(20, dtype=torch.long), Guidance(1.0)
    moved = first_step(alone, x, 1.0, SD_END, expert, Conditions(), one)
    torch.testing.assert_close(moved, _exact(GAUSSIAN, x, 1.0, SD_END))
    errors = []
    for steps in (20, 40):
        times = torch.cat([torch.ones(1).double(), time_grid(steps, first=SD_END)])
        made = integrate(alone, x, times, expert=expert, solver="heun")
        errors.append((made - _exact(GAUSSIAN, x, 1.0, 0.0)).square().mean().sqrt())
    # No floor: what is wrong falls as the solver's order says.
    assert errors[0] / errors[1] > 3.2
    known.calibration = None
    moved = first_step(alone, x, 1.0, SD_END, expert, Conditions(), one)
    torch.testing.assert_close(moved, SD_END * x)


def test_without_moments_the_first_call_tells_the_mean_of_the_data() -> None:
    """At equal calls it is nearer to the exact flow than noise alone, and than networks above their end."""
    noise = Seeded(3).initial(range(200), SHAPE)
    for case in (SD, DDPM):
        field = oracle_field(GAUSSIAN, case, "epsilon", sample_shape=SHAPE)
        exact = _exact(GAUSSIAN, noise, 1.0, 0.0).float()

        def velocity(x: Tensor, now: Tensor, then: Tensor, field: VelocityField = field) -> Tensor:
            return field.velocity(x, now)

        solve = SOLVERS["adams-moulton"]
        errors = [
            (made - exact).square().mean().sqrt()
            for made in (
                sample(field, 200, 3, 25),
                solve(velocity, noise, time_grid(25)),
                solve(velocity, field.end * noise, time_grid(25, first=field.end)),
            )
        ]
        assert errors[0] < min(errors[1:]) / 2


def test_what_networks_see_at_their_end_is_the_mean_and_one_call_alone_is_what_they_see() -> None:
    field = _counted(GAUSSIAN)
    x = Seeded(3).initial(range(4), SHAPE)
    seen = mean_seen(lambda x, now, then: field.velocity(x, now), x, 1.0, SD_END)
    # Noise tells next to nothing of what it hides.
    torch.testing.assert_close(
        seen.double().flatten(1), GAUSSIAN.mean.expand(4, -1), atol=0.3, rtol=0
    )
    torch.testing.assert_close(sample(field, 4, 3, 1, solver="euler"), seen)
    assert len(field.asked) == 2


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("adams-moulton", 2)])
def test_a_mixture_keeps_the_order_of_the_solver(solver: str, order: int) -> None:
    shard = SHARDS[0]
    field = oracle_field(shard, SD, "epsilon", sample_shape=SHAPE)
    field.calibration = _calibration(shard)

    def at(steps: int, solver: str) -> Tensor:
        return sample(field, 64, 2, steps, solver=solver).double()

    exact = at(200, "heun")
    coarse, fine = ((at(steps, solver) - exact).square().mean().sqrt().item() for steps in (24, 48))
    assert coarse / fine > 2 ** (order - 0.3)


def test_draw_gives_each_sample_the_grid_of_its_own_expert() -> None:
    ensemble = _ensemble("draw")
    ends = [field.end for field in ensemble.experts]
    assert len({*ends}) == 3
    whole = sample(ensemble, 30, 1, 8, batch_size=7)
    drawn = torch.cat([batch.expert for batch in _batches(ensemble, 30, 1)])
    assert {*drawn.tolist()} == {0, 1, 2}
    for k, field in enumerate(ensemble.experts):
        assert max(field.asked) == ends[k]
        assert len(field.asked) % 8 == 0
        assert len({*field.asked}) == (7 if k < 2 else 8)
    for k in range(3):
        alone = sample(_ensemble("draw"), 30, 1, 8, expert=k)
        own = _drawn(ensemble, 30, 1) == k
        torch.testing.assert_close(whole[own], alone[own], rtol=1e-5, atol=1e-5)


def _batches(ensemble: Ensemble, num: int, seed: int) -> list[Batch]:
    how = plan(ensemble, noise=Seeded(seed))
    return list(batches(how, range(num), Conditions(), num))


def _drawn(ensemble: Ensemble, num: int, seed: int) -> Tensor:
    found = torch.zeros(num, dtype=torch.long)
    for batch in _batches(ensemble, num, seed):
        assert batch.expert is not None
        found[batch.rows] = batch.expert
    return found


def test_a_mixture_begins_at_the_largest_end_and_a_pair_at_that_of_its_noisy_half() -> None:
    mixed = _ensemble("full", (SD, DDPM, SD))
    sample(mixed, 4, steps=6)
    for field in mixed.experts:
        assert field.asked[0] == max(field.asked) == mixed.experts[1].end
    pair = [_counted(GAUSSIAN, DDPM), _counted(GAUSSIAN, SD)]
    pair[0].noise_range, pair[1].noise_range = (0.0, 0.5), (0.5, 1.0)
    for strategy in ("draw", "full"):
        ensemble = Ensemble(in_parts(pair, [0, 0]), strategy=strategy)
        assert all(beginner_of(ensemble, k) is pair[1] for k in range(2))
        sample(ensemble, 4, steps=6)
        assert pair[1].asked[0] == max(pair[1].asked) == SD_END
        assert max(pair[0].asked) < 0.5


@pytest.mark.parametrize("strategy", ["commit-0.98", "commit-0.5"])
def test_experts_commit_at_or_below_the_time_at_which_networks_begin(strategy: str) -> None:
    ensemble = _ensemble(strategy, (SD, SD, SD))
    sample(ensemble, 8, steps=6)
    for field in ensemble.experts:
        assert max(field.asked, default=SD_END) == SD_END
    assert sum(len(field.asked) for field in ensemble.experts) > 6


def test_a_mix_of_calibrated_experts_moves_as_the_flow_of_all_the_data_to_second_order() -> None:
    fields = []
    for shard in SHARDS:
        field = oracle_field(shard, SD, "epsilon", sample_shape=SHAPE)
        field.calibration = _calibration(shard)
        fields.append(field)
    model = Ensemble(fields, exact_router(SHARDS, PRIOR), "full", PRIOR)
    whole = GaussianMixture.union(SHARDS, PRIOR)
    x = torch.randn(50, *SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        return whole.velocity(x, now.expand(len(x)))

    errors = []
    for t in (0.96, 0.98):
        exact = SOLVERS["heun"](velocity, x, torch.linspace(1, t, 100, dtype=torch.float64))
        moved = first_step(model, x, 1.0, t, None, Conditions(), Guidance(1.0))
        errors.append((moved - exact).square().mean().sqrt().item())
    assert errors[0] < 0.002
    assert errors[0] / errors[1] > 3


class Labelled(torch.nn.Module):
    """A network of noise of the Gaussian around the place of its class; label 2 is none."""

    def forward(self, y: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        return y


MEANS = torch.tensor([[1.0, 2, 3, 4], [-2.0, 0, 1, 3]], dtype=torch.float64)


def _labelled(case: Case = SD) -> Counted:
    null = {"class_labels": torch.tensor(2)}
    options = {"conditions": ("class_labels",), "null_conditions": null, "sample_shape": SHAPE}
    calibration = _calibration(GAUSSIAN, MEANS)
    return Counted(Labelled(), case.schedule, "epsilon", calibration=calibration, **options)


@pytest.mark.parametrize(
    ("guidance", "mean"),
    [
        (Guidance(1.0), MEANS[0]),
        (Guidance(3.0), GAUSSIAN.mean + 3 * (MEANS[0] - GAUSSIAN.mean)),
        (Guidance(3.0, interval=(0.0, 0.9)), MEANS[0]),
    ],
    ids=["plain", "guided", "not guided there"],
)
def test_the_first_step_is_guided_as_the_velocity_of_the_gaussian_is(
    guidance: Guidance, mean: Tensor
) -> None:
    model = Ensemble([_labelled()], strategy="draw")
    x = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    given = Conditions({"class_labels": torch.zeros(6, dtype=torch.long)})
    moved = first_step(model, x, 1.0, SD_END, torch.zeros(6).long(), given, guidance)
    torch.testing.assert_close(moved, _exact(replace(GAUSSIAN, means=mean[None]), x, 1.0, SD_END))


def test_guidance_by_a_weak_model_takes_its_moments() -> None:
    field, weak = _labelled(), _labelled()
    weak.calibration, field.weak = _calibration(SHARDS[0], MEANS.flip(0)), weak
    model = Ensemble([field], strategy="draw")
    x = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    given, expert = Conditions({"class_labels": torch.zeros(6).long()}), torch.zeros(6).long()
    own, other = (
        _exact(replace(shard, means=mean[None]), x, 1.0, SD_END)
        for shard, mean in ((GAUSSIAN, MEANS[0]), (_of(SHARDS[0]), MEANS[1]))
    )
    moved = first_step(model, x, 1.0, SD_END, expert, given, Guidance(2.0, by="weak"))
    torch.testing.assert_close(moved, 2 * own - other)


def _of(shard: GaussianMixture) -> GaussianMixture:
    """The Gaussian with a shard's moments."""
    return GaussianMixture(torch.ones(1).double(), shard.mean[None], shard.covariance[None])


def test_a_calibration_of_other_samples_is_left_out_and_said() -> None:
    field = _labelled()
    labels = torch.zeros(2).long()
    with pytest.warns(UserWarning, match="a calibration is of one size alone: those of expert 0"):
        found = sample(field, 2, shape=(1, 4, 4), class_labels=labels, steps=2)
    assert found.shape == (2, 1, 4, 4)
    # Where a caller asks for velocities, the calibration is not silently dropped.
    told = refusal(field.velocity, found, torch.full((2,), 0.5), class_labels=labels)
    assert "its calibration is of samples (1, 2, 2), not of (1, 4, 4)" in told


PICTURE = torch.full((1, *SHAPE), 0.7)
OPEN = torch.ones(1, 1, *SHAPE[1:], dtype=torch.bool)
HALF = OPEN.clone()
HALF[..., :1] = False


def test_pictures_that_begin_below_the_end_are_sampled_as_they_are_without_a_first_step() -> None:
    field = _counted(GAUSSIAN)
    start = Picture(PICTURE, 0.6)
    made = sample(field, 3, 5, 10, picture=start)

    def velocity(x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        return field.velocity(x, now)

    noised = start.noised(Seeded(5).initial(range(3), SHAPE))
    times = start.times(time_grid(10))
    assert torch.equal(made, SOLVERS["adams-moulton"](velocity, noised, times))
    assert field.asked[0] == 0.6


@pytest.mark.parametrize("options", [{}, {"mask": HALF, "resampling": 2}], ids=["all", "masked"])
def test_pictures_that_begin_above_the_end_go_there_first(options: Mapping[str, Any]) -> None:
    asked = {}
    for strength in (0.93, 0.95, 0.99, 1.0):
        field = _counted(GAUSSIAN)
        made = sample(field, 2, 5, 20, picture=Picture(PICTURE, strength, **options))
        assert made.isfinite().all()
        assert max(field.asked) == min(strength, SD_END)
        asked[strength] = len({*field.asked})
        if options:
            assert torch.equal(made[..., :1], PICTURE[..., :1].expand(2, *SHAPE[:2], 1))
    # The picture above the end has as many steps as before, one of which is the call that asks.
    assert asked == {0.93: 19, 0.95: 18, 0.99: 19, 1.0: 19}
    if not options:
        assert torch.equal(made, sample(_counted(GAUSSIAN), 2, 5, 20))


def test_samples_of_one_draw_have_as_many_steps_whatever_their_experts_cover() -> None:
    ensemble = _ensemble("draw")
    how = plan(ensemble, steps=20, picture=lambda expert: Picture(PICTURE, 0.95))
    found = {len(how.times_of(batch)) for batch in batches(how, range(30), Conditions(), 30)}
    assert found == {how.steps + 1}


def test_an_edit_begins_at_the_end_and_moves_as_the_means_of_its_conditions() -> None:
    labels = {"class_labels": torch.zeros(1).long()}
    for case, source, means in (
        (SD, 0, 0 * MEANS[0]),
        (SD, 1, MEANS[0] - MEANS[1]),
        (DDPM, 1, MEANS[0] - MEANS[1]),
    ):
        field = _labelled(case)
        from_label = Conditions({"class_labels": torch.tensor([source])})
        picture = Picture(PICTURE, 1.0, source=from_label)
        model = Ensemble([field], strategy="draw")
        how = plan(model, steps=5, picture=lambda k, picture=picture: picture)
        run(how, next(iter(batches(how, [0], Conditions(labels), 1))))
        assert max(field.asked) == field.end
        assert len(field.asked) == 2 * 5
        # The edit is asked for at its own state and at the picture, with one noise.
        moved = (field.states[0] - field.states[1]).flatten().double()
        torch.testing.assert_close(moved, (1 - field.end) * means, atol=1e-5, rtol=0)


def test_trajectories_of_students_begin_at_noise_and_their_teachers_networks_at_the_end() -> None:
    teacher = _counted(GAUSSIAN, calibration=_calibration(GAUSSIAN))
    other = _counted(SHARDS[0], DDPM, calibration=_calibration(SHARDS[0]))
    model = Ensemble([teacher, other], strategy="draw", shift=3.0)
    expert = torch.tensor([0, 1, 0, 0, 1])
    found = solve(model, 5, 3, SHAPE, {"expert": expert}, 1.0)
    assert float(found.times[0]) == 1
    assert len(found.times) == len(SOLVED)
    # At a shift of 3 two of these times lie above the end of Stable Diffusion's schedule.
    assert (found.times > SD_END).sum() == 2
    own = expert == 0
    x = found.states[:, 0].double()
    for place, t in enumerate(found.times.tolist()):
        exact = _exact(GAUSSIAN, x[own], 1.0, t).float()
        torch.testing.assert_close(found.states[own, place], exact, rtol=0, atol=0.03)
    assert teacher.asked[0] == max(teacher.asked) == SD_END
    assert other.asked[0] == max(other.asked) == other.end
    assert len(other.asked) == len(SOLVED) - 1
    assert len(teacher.asked) == len(SOLVED) - 2
    assert plan(model, steps=GRID).times[0] == 1


def test_kept_trajectories_of_a_teacher_with_a_first_step_are_told_from_those_without(
    tmp_path: Any,
) -> None:
    file = tmp_path / "kept.safetensors"
    flow, short = (Ensemble([_counted(GAUSSIAN, case)], strategy="full") for case in (LINEAR, SD))
    first = solve(flow, 4, 0, SHAPE, {}, 1.0, file).states
    again = solve(short, 4, 0, SHAPE, {}, 1.0, file).states
    assert not torch.equal(first, again)
    asked = len(short.experts[0].asked)
    assert torch.equal(solve(short, 4, 0, SHAPE, {}, 1.0, file).states, again)
    assert len(short.experts[0].asked) == asked


def test_times_of_the_callers_own_are_steps_above_the_end_too() -> None:
    field, steps = _counted(GAUSSIAN, calibration=_calibration(GAUSSIAN)), []
    times = torch.tensor([1.0, 0.97, 0.95, 0.9, 0.4, 0.0], dtype=torch.float64)
    x = Seeded(1).initial(range(3), SHAPE)

    def on_step(index: int, x: Tensor) -> Tensor:
        steps.append((index, x))
        return x

    integrate(field, x, times, on_step=on_step)
    assert [index for index, _ in steps] == [0, 1, 2, 3, 4]
    exact = _exact(GAUSSIAN, x, 1.0, 0.95).float()
    torch.testing.assert_close(steps[1][1], exact)
    assert field.asked == [SD_END, 0.9, 0.4]
    torch.testing.assert_close(integrate(field, x, times[:3]), exact)
    field.calibration, field.asked = None, []
    blind = integrate(field, x, times[:3])
    assert field.asked == [SD_END]
    assert (blind - exact).norm() < (0.95 * x - exact).norm() / 4
    integrate(field, x, times)
    assert field.asked[1:] == [SD_END, SD_END, 0.9, 0.4]
    up = integrate(field, x, times[2:].flip(0))
    assert up.isfinite().all()


def test_the_grid_of_a_batch_is_the_plans_own_where_nothing_begins_above() -> None:
    how = plan(Ensemble([_counted(GAUSSIAN, LINEAR)], strategy="draw"))
    assert how.times_of(Batch.of(2, Conditions(), torch.zeros(2).long())) is how.times
    own = plan(_counted(GAUSSIAN), times=time_grid(3), noise=Latents(x=torch.zeros(2, *SHAPE)))
    assert own.times_of(Batch.of(2, Conditions(), torch.zeros(2).long())) is own.times
    assert own.beginning_of([0]) == (SD_END, True)


def test_no_sample_depends_on_the_batch_that_it_is_in() -> None:
    ensemble = _ensemble("draw")
    many = sample(ensemble, 12, 7, 6)
    for batch_size, start in itertools.product((1, 5), (0, 4)):
        again = sample(ensemble, 12 - start, 7, 6, batch_size=batch_size, start=start)
        torch.testing.assert_close(again, many[start:], rtol=1e-5, atol=1e-5)


def test_an_expert_alone_is_refused_where_its_own_range_of_noise_leaves_some_out() -> None:
    field = _counted(GAUSSIAN, noise_range=(0.0, 0.95))
    assert "is outside the noise range 0:0.95" in refusal(sample, field, 2)
    flow = VelocityField(lambda x, t: x, LinearSchedule(), "flow_prediction", sample_shape=SHAPE)
    assert plan(flow).beginning_of() == (1, False)
