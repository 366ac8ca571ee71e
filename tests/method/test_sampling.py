"""Sampling of experts and of ensembles: grids, seeds, draws, and flows that are known in closed form."""

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hddm.choice import pick_experts
from hddm.editing import Picture
from hddm.ensemble import Ensemble
from hddm.expert_use import ExpertUse
from hddm.guidance import Guidance
from hddm.noise import Seeded
from hddm.running import NotFinite
from hddm.sampling import integrate, plan, sample, time_grid
from hddm.schedules import LinearSchedule
from hddm.solvers import SOLVERS
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.artefacts import refusal
from tests.cases import LINEAR, Case, ConditionSum, case_named, in_parts, oracle_field
from tests.oracles import GaussianMixture, exact_router

SHAPE = (1, 2, 2)
GAUSSIAN = GaussianMixture.random(seed=5, modes=1, dim=4)
SHARDS = [GaussianMixture.random(seed=20 + k, modes=2, dim=4) for k in range(3)]
PRIOR = [0.2, 0.5, 0.3]


def _field(case: Case = LINEAR, kind: str = "epsilon") -> VelocityField:
    return oracle_field(GAUSSIAN, case, kind, sample_shape=SHAPE)


def _ensemble(strategy: str = "nucleus-0.9") -> Ensemble:
    fields = [oracle_field(shard, sample_shape=SHAPE) for shard in SHARDS]
    return Ensemble(fields, exact_router(SHARDS, PRIOR), strategy, PRIOR)


@pytest.mark.parametrize("shift", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("steps", [1, 7, 50])
def test_grid_is_the_shifted_even_one(steps: int, shift: float) -> None:
    u = [1 - i / steps for i in range(steps + 1)]
    expected = [shift * value / (1 + (shift - 1) * value) for value in u]
    grid = time_grid(steps, shift)
    assert grid.dtype == torch.float64
    assert grid[0] == 1
    assert grid[-1] == 0
    assert (grid.diff() < 0).all()
    torch.testing.assert_close(grid, torch.tensor(expected, dtype=torch.float64))


def test_a_shift_that_leaves_steps_no_length_is_refused() -> None:
    for shift in (1e15, -0.5, 0.0, math.inf):
        told = f"`shift` {shift:g}: must be positive, and near enough to 1 for 25 steps"
        assert refusal(time_grid, 25, shift) == told
    for steps in (0, -1):
        assert refusal(sample, _field(), 2, steps=steps) == f"`steps` {steps}: must be 1 or more"


@pytest.mark.parametrize(
    ("solver", "steps", "tolerance"),
    [("euler", 100, 0.06), ("heun", 40, 0.01), ("adams-moulton", 40, 0.01)],
)
@pytest.mark.parametrize(
    ("name", "kind"), [("linear", "flow_prediction"), ("cosine", "epsilon")], ids=["flow", "ddpm"]
)
def test_noise_flows_along_the_known_map(
    name: str, kind: str, solver: str, steps: int, tolerance: float
) -> None:
    num = 1500
    field = _field(case_named(name), kind)
    found = sample(field, num, 3, steps, solver=solver, batch_size=num)
    values, vectors = torch.linalg.eigh(GAUSSIAN.covariance)
    root = vectors * values.sqrt() @ vectors.T
    flat = Seeded(3).initial(range(num), SHAPE).double().flatten(1)
    exact = GAUSSIAN.mean + flat @ root
    assert (found.double().flatten(1) - exact).square().mean().sqrt() < tolerance
    # Standard errors at this number are 0.026 of a standard deviation and 0.04 of a variance.
    data = found.double().flatten(1)
    torch.testing.assert_close(data.mean(0), GAUSSIAN.mean, atol=0.1, rtol=0)
    torch.testing.assert_close(data.T.cov(), GAUSSIAN.covariance, atol=0.13, rtol=0)


def test_samples_of_an_ensemble_have_the_moments_of_the_whole() -> None:
    whole = GaussianMixture.union(SHARDS, PRIOR)
    for strategy in ("full", "draw", "commit-0.5"):
        data = sample(_ensemble(strategy), 3000, 1, 30, batch_size=3000).double().flatten(1)
        torch.testing.assert_close(data.mean(0), whole.mean, atol=0.15, rtol=0)
        torch.testing.assert_close(data.T.cov(), whole.covariance, atol=0.3, rtol=0)


def test_committing_weighs_by_the_posterior_and_gives_each_expert_its_own_data() -> None:
    # The shards overlap, so that who is drawn depends on the state, and whom it ends at on who was drawn.
    ensemble, num = _ensemble("commit-0.6"), 6000
    t = torch.full((num,), 0.6001, dtype=torch.float64)
    states = GaussianMixture.union(SHARDS, PRIOR).states(t, seed=1, shape=SHAPE)
    posterior = exact_router(SHARDS, PRIOR)(states, t)
    torch.testing.assert_close(ensemble.weights(states, t), posterior, atol=1e-9, rtol=0)
    seen: list[Tensor] = []
    use = ExpertUse(3)

    def on_step(index: int, x: Tensor) -> Tensor:
        if index == 39:
            seen.append(use.last.argmax(1))
        return x

    made = (
        sample(ensemble, num, 1, 40, batch_size=num, use=use, on_step=on_step).double().flatten(1)
    )
    for k, (shard, share) in enumerate(zip(SHARDS, PRIOR, strict=True)):
        own = made[seen[0] == k]
        assert abs(len(own) / num - share) < 4 * (share * (1 - share) / num) ** 0.5
        error = (shard.covariance.diagonal() / len(own)).sqrt()
        assert ((own.mean(0) - shard.mean).abs() < 4 * error + 0.02).all()
        torch.testing.assert_close(own.T.cov(), shard.covariance, atol=0.2, rtol=0)


@pytest.mark.integration
def test_committing_keeps_the_order_of_a_solver() -> None:
    def at(steps: int, solver: str) -> Tensor:
        return sample(_ensemble("commit-0.5"), 64, 2, steps, solver=solver).double()

    exact = at(160, "heun")
    for solver, order in (("euler", 1), ("heun", 2), ("adams-moulton", 2)):
        # Samples that another step size sends to another expert say nothing about the order.
        errors = torch.stack(
            [(at(steps, solver) - exact).flatten(1).norm(dim=1) for steps in (20, 40)]
        )
        same = errors.amax(0) < 0.5
        assert same.sum() > 48
        coarse, fine = errors[:, same].square().mean(1).sqrt().tolist()
        assert coarse / fine > 2 ** (order - 0.3), solver


@pytest.mark.parametrize("strategy", ["full", "top-1", "draw", "commit-0.6"])
def test_a_sample_depends_on_its_seed_and_index_alone(strategy: str) -> None:
    ensemble = _ensemble(strategy)
    many = sample(ensemble, 11, seed=7, steps=8)
    for batch_size in (1, 3):
        again = sample(ensemble, 11, seed=7, steps=8, batch_size=batch_size)
        torch.testing.assert_close(again, many, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sample(ensemble, 4, 7, 8), many[:4], rtol=1e-5, atol=1e-5)
    other = sample(ensemble, 11, seed=8, steps=8)
    assert ((other - many).flatten(1).norm(dim=1) > 1e-3).all()


def test_initial_noise_is_unit_and_independent_between_samples_seeds_and_draws() -> None:
    one, two = (Seeded(seed).initial(range(2000), (4,)).double() for seed in (0, 1))
    both = torch.cat([one, two, one.roll(1, 0), two.roll(1, 0)], 1)
    # Entries of the sample covariance have standard error 0.022 to 0.032.
    torch.testing.assert_close(both.T.cov(), torch.eye(16).double(), atol=0.13, rtol=0)
    torch.testing.assert_close(both.mean(0), torch.zeros(16).double(), atol=0.1, rtol=0)
    assert torch.equal(Seeded(0).initial(range(5, 9), (4,)), Seeded(0).initial(range(9), (4,))[5:])
    drawn = pick_experts(
        torch.tensor([0.5, 0.5], dtype=torch.float64), Seeded(0).draws(range(2000))
    )
    gap = one[drawn == 0].mean(0) - one[drawn == 1].mean(0)
    assert (gap.abs() < 4 * 2 / 2000**0.5).all()


def test_strategy_of_the_call_is_used_and_the_ensemble_s_own_restored() -> None:
    ensemble = _ensemble("full")
    drawn = sample(ensemble, 6, steps=4, strategy="draw")
    assert ensemble.strategy == "full"
    torch.testing.assert_close(drawn, sample(_ensemble("draw"), 6, steps=4))
    assert not torch.allclose(drawn, sample(ensemble, 6, steps=4), atol=1e-3)
    ensemble.router = None
    for strategy in ("top-9", "top-1"):
        with pytest.raises(HddmError):
            sample(ensemble, 2, steps=2, strategy=strategy)
    assert ensemble.strategy == "full"


def test_conditions_and_guidance_reach_each_sample_s_own_row() -> None:
    null, labels = {"class_labels": torch.tensor(1)}, torch.arange(10)
    field = ConditionSum().field("class_labels", null_conditions=null, sample_shape=SHAPE)
    noise = Seeded(0).initial(range(10), SHAPE)
    for scale, drift in ((1.0, labels), (2.0, 2 * labels - 1)):
        found = sample(field, 10, steps=3, guidance_scale=scale, batch_size=4, class_labels=labels)
        torch.testing.assert_close(found, noise - drift.view(-1, 1, 1, 1))


@pytest.mark.parametrize(
    ("word", "meant"),
    [("nsteps", "steps"), ("guidance", "guidance_scale"), ("class_label", "class_labels")],
)
def test_an_unknown_keyword_is_named_with_the_nearest_one(word: str, meant: str) -> None:
    told = refusal(sample, ConditionSum().field("class_labels"), 2, **{word: 3})
    wanted = f"no condition {word!r}; it declares: class_labels; did you mean {meant!r}?"
    assert told == f"this model takes {wanted}"


def test_samples_are_float32_of_the_asked_shape() -> None:
    field = ConditionSum().field()
    found = sample(field, 5, steps=2, shape=(3, 2, 4), batch_size=2)
    assert "shape" in refusal(sample, field, 2)
    assert found.shape == (5, 3, 2, 4)
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"start": -1}, "index -1: must be a whole number from 0"),
        ({"expert": 1, "strategy": "draw"}, "choose one of the two"),
        ({"solver": "dpm"}, "euler, heun, adams-moulton"),
        ({"expert": 1}, "`expert` 1: choose from 0 to 0"),
        ({"strategy": "best"}, "unknown strategy"),
        ({"class_labels": torch.zeros(3).long()}, "3 rows for 2"),
        ({"num": 0}, "`num` 0: must be 1 or more"),
        ({"shape": (3, 2, 2)}, r"`shape` \(3, 2, 2\): samples of this model have 1 channels"),
    ],
    ids=str,
)
def test_what_cannot_be_sampled_is_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(HddmError, match=match):
        sample(_field(), **{"num": 2, **options})


def test_an_expert_that_breaks_is_named_under_every_strategy() -> None:
    def broken(y: Tensor, time: Tensor) -> Tensor:
        return torch.where((time > 0.94)[:, None, None, None], torch.nan, y)

    fields = [VelocityField(broken, LinearSchedule(), "flow_prediction", sample_shape=SHAPE)] * 2
    for strategy in ("draw", "full", "commit-0.9"):
        ensemble = Ensemble(fields, lambda x, t: x.new_full((len(x), 2), 0.5), strategy)
        with pytest.raises(NotFinite, match=r"velocity of expert 0"):
            sample(ensemble, 4, steps=20)


CALLS = {"euler": 1, "heun": 2, "adams-moulton": 1}


class Expert:
    """Data at one place, plus what the label adds: Euler's steps end exactly there. Counts its calls."""

    def __init__(self, place: float, conditions: tuple[str, ...] = ()) -> None:
        self.place, self.conditions = place, conditions
        self.rows: list[int] = []

    def __call__(
        self, x: Tensor, t: Tensor, class_labels: Tensor | None = None, **_: Tensor
    ) -> Tensor:
        self.rows.append(len(x))
        labels = torch.zeros(len(x)) if class_labels is None else class_labels
        places = self.place + labels.to(x).view(-1, 1, 1, 1) / 16
        return (x - places) / t.clamp_min(1e-9).view(-1, 1, 1, 1)

    def field(self) -> VelocityField:
        given = {"conditions": self.conditions, "sample_shape": SHAPE}
        nulls = {name: torch.tensor(0) for name in self.conditions}
        return VelocityField(
            self, LinearSchedule(), "flow_prediction", null_conditions=nulls, **given
        )


class CountingRouter:
    """Prefers another expert for every sample and time, by the mean of the state."""

    def __init__(self, num: int) -> None:
        self.places = torch.linspace(-1, 1, num)
        self.times: list[float] = []

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.times.append(float(t[0]))
        distance = x.flatten(1).mean(1)[:, None] - (self.places + t[0].sin()).to(x)
        return (-4 * distance**2).softmax(1)


def _routed(
    strategy: str, conditions: tuple[str, ...] = (), prior: Any = None, class_prior: Any = ()
) -> Ensemble:
    fields = [Expert(place, conditions).field() for place in (-8.0, 0.0, 8.0)]
    return Ensemble(in_parts(fields, None, class_prior), CountingRouter(3), strategy, prior)


def _arrived(samples: Tensor) -> Tensor:
    """Index of the expert that each sample ended at."""
    return (samples[:, 0, 0, 0] / 8).round().long() + 1


@pytest.mark.parametrize("solver", list(CALLS))
@pytest.mark.parametrize("every", [1, 2, 100])
def test_the_router_is_asked_at_every_nth_call_of_a_batch(every: int, solver: str) -> None:
    ensemble = _routed("top-2")
    sample(ensemble, 10, steps=7, solver=solver, batch_size=4, router_every=every)
    assert len(ensemble.router.times) == 3 * math.ceil(7 * CALLS[solver] / every)
    assert ensemble.router.times[0] == 1


@pytest.mark.parametrize("options", [{"strategy": "draw"}, {"expert": 1}], ids=str)
def test_who_was_drawn_or_named_stays_and_the_router_is_not_asked(options: dict[str, Any]) -> None:
    ensemble = _routed("top-2")
    samples = sample(ensemble, 40, steps=3, **options)
    assert ensemble.router.times == []
    assert set(_arrived(samples).tolist()) == ({1} if "expert" in options else {0, 1, 2})


CLASS_PRIOR = [[0.7, 0.2, 0.1], [0.0, 0.5, 0.5], [30, 10, 0]]
SHARES = [*CLASS_PRIOR[:2], [0.75, 0.25, 0.0]]
SHARES_OF_ALL = [0.2, 0.2, 0.6]


@pytest.mark.parametrize("label", [0, 1, 2, 3])
def test_draw_follows_the_class_and_without_one_the_prior(label: int) -> None:
    ensemble = _routed("draw", ("class_labels",), prior=SHARES_OF_ALL, class_prior=CLASS_PRIOR)
    num = 1500
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = sample(
            ensemble, num, steps=1, batch_size=num, class_labels=torch.full((num,), label)
        )
    shares = SHARES[label] if label < 3 else SHARES_OF_ALL
    found = _arrived(samples - label / 16).bincount(minlength=3) / num
    for share, one in zip(shares, found.tolist(), strict=True):
        assert abs(one - share) <= 4 * (share * (1 - share) / num) ** 0.5


def _warned(ensemble: Ensemble, **conditions: Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sample(ensemble, 2, steps=1, **conditions)
    # A warning points at who called.
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_a_warning_comes_where_what_to_draw_from_is_not_known_and_only_there() -> None:
    labels, text = (
        {"class_labels": torch.zeros(2).long()},
        {"encoder_hidden_states": torch.zeros(2, 1)},
    )
    both = ("class_labels", "encoder_hidden_states")
    known = {"class_prior": [[1, 1, 1]]}
    unknown = " not decide which expert makes an image, only the shares do"
    assert _warned(_routed("draw", both), **labels) == [f"class_labels do{unknown}"]
    told = [f"the prompt does{unknown}; hddm describe changes that"]
    assert _warned(_routed("draw", both, **known), **text) == told
    pair = [Expert(0.0, both).field(), Expert(8.0, both).field()]
    pair[0].noise_range, pair[1].noise_range = (0.0, 0.5), (0.5, 1.0)
    assert _warned(Ensemble(in_parts(pair, [0, 0]), strategy="draw"), **text) == []
    assert _warned(_routed("draw", both, **known), **labels) == []
    assert _warned(_routed("draw", both)) == []
    assert _warned(_routed("top-1", both), **labels) == []
    assert _warned(Ensemble([Expert(0.0, both).field()], strategy="draw"), **labels) == []


def test_samples_run_expert_by_expert_and_come_back_in_order() -> None:
    experts = [Expert(place) for place in (-8.0, 0.0, 8.0)]
    ensemble = Ensemble([expert.field() for expert in experts], strategy="draw")
    samples = sample(ensemble, 24, seed=5, steps=2, batch_size=6)
    # Four batches in the order of experts: only one that ends inside a batch shares it.
    assert sum(len(expert.rows) for expert in experts) <= 2 * (4 + 2)
    assert all(max(expert.rows) == 6 for expert in experts)
    assert (_arrived(samples).diff() < 0).any()
    for index, one in enumerate(samples):
        alone = sample(ensemble, 1, seed=5, steps=2, start=index)[0]
        torch.testing.assert_close(one, alone)


PICTURE = Picture(torch.zeros(1, *SHAPE), 0.5)
HOLE = replace(PICTURE, mask=torch.ones(1, 1, *SHAPE[1:], dtype=torch.bool))
WITHOUT_EFFECT: list[tuple[str, dict[str, Any], str]] = [
    (
        "draw",
        {"router_every": 2},
        "`router_every` 2: no router runs, since strategy draw keeps one expert",
    ),
    (
        "top-1",
        {"router_every": 2, "expert": 1},
        "`router_every` 2: no router runs, since `expert` 1 is chosen; drop it",
    ),
    ("top-1", {"guidance_scale": Guidance(1.0, by="weak")}, "`guide_by` weak: has no effect at"),
    ("top-1", {"guidance_scale": Guidance(1.0, channels=1)}, "`cfg_channels` 1: has no effect at"),
    (
        "top-1",
        {"guidance_scale": Guidance(1.0, interval=(0.2, 1))},
        "`guidance_interval` 0.2 1.0: has no",
    ),
    (
        "top-1",
        {"guidance_scale": Guidance(1.0, rescale=0.5)},
        "`guidance_rescale` 0.5: has no effect at",
    ),
    (
        "top-1",
        {"negative": {"hue": torch.zeros(2)}},
        "negative conditions: no effect at `guidance_scale` 1",
    ),
    (
        "draw",
        {"expert": 1, "strategy": None, "prior": torch.ones(2, 3)},
        "`expert` 1 is chosen already",
    ),
    (
        "draw",
        {"picture": HOLE, "solver": "adams-moulton"},
        "`solver` adams-moulton: uses earlier steps",
    ),
]


@pytest.mark.parametrize(("strategy", "options", "words"), WITHOUT_EFFECT, ids=str)
def test_an_option_without_effect_is_refused(
    strategy: str, options: dict[str, Any], words: str
) -> None:
    given = {"hue": torch.zeros(2)} if "negative" in options else {}
    assert words in refusal(sample, _routed(strategy, ("hue",)), 2, steps=2, **options, **given)


def test_one_expert_has_no_router_to_ask_less_often() -> None:
    told = refusal(sample, _field(), 2, router_every=3)
    assert told == "`router_every` 3: no router runs, since there is one expert; drop it"
    assert "pass neither `steps` nor `shift`" in refusal(
        integrate, _field(), torch.zeros(1, *SHAPE), time_grid(2), steps=3
    )
    assert "repeats steps inside a `mask`, and there is none" in refusal(
        replace, PICTURE, resampling=3
    )


def _pair() -> Ensemble:
    high, low = Expert(0.0).field(), Expert(0.0).field()
    high.noise_range, low.noise_range = (0.5, 1.0), (0.0, 0.5)
    return Ensemble(in_parts([high, low], [0, 0]), strategy="nucleus-0.9")


@pytest.mark.parametrize("strategy", ["draw", "full", "top-1", "commit-0.5"])
def test_a_strategy_without_experts_to_choose_among_is_refused(strategy: str) -> None:
    alone = "has no effect, since there is one expert; drop it"
    for model in (_field(), Ensemble([_field()], strategy="nucleus-0.9")):
        assert refusal(sample, model, 2, strategy=strategy) == f"`strategy` {strategy}: {alone}"
    told = refusal(sample, _pair(), 2, strategy=strategy)
    assert (
        told
        == f"`strategy` {strategy}: has no effect, since the noise level chooses the expert; drop it"
    )
    # Its own is no choice of anybody.
    assert torch.equal(
        sample(_pair(), 2, steps=2), sample(_pair(), 2, steps=2, strategy="nucleus-0.9")
    )


def test_the_noise_level_chooses_among_a_pair_and_no_router_does() -> None:
    told = refusal(sample, _pair(), 2, router_every=2)
    assert (
        told
        == "`router_every` 2: no router runs, since the noise level chooses the expert; drop it"
    )


def test_a_plan_names_the_solver_that_runs() -> None:
    ensemble = _routed("draw")
    for picture, name in ((None, "adams-moulton"), (PICTURE, "adams-moulton"), (HOLE, "euler")):
        assert plan(ensemble, picture=lambda _, one=picture: one).solver_name == name
        heun = plan(ensemble, picture=lambda _, one=picture: one, solver="heun")
        assert (heun.solver_name, heun.solver) == ("heun", SOLVERS["heun"])


def test_under_draw_experts_that_cannot_take_a_condition_make_no_image() -> None:
    places = {-8.0: ("hue",), 0.0: (), 8.0: ("hue",)}
    ensemble = Ensemble(
        [Expert(place, one).field() for place, one in places.items()], strategy="draw"
    )
    assert set(_arrived(sample(ensemble, 40, steps=1)).tolist()) == {0, 1, 2}
    with pytest.warns(UserWarning, match="hue do not decide"):
        arrived = _arrived(sample(ensemble, 40, steps=1, hue=torch.zeros(40)))
    assert set(arrived.tolist()) == {0, 2}
    told = refusal(sample, ensemble, 2, steps=1, expert=1, hue=torch.zeros(2))
    assert told == "expert 1 cannot take hue; use another expert, or leave it out"
    one = Ensemble(ensemble.experts[:2], strategy="draw")
    # Only one can, so nothing is left to the shares.
    assert _warned(one, hue=torch.zeros(2)) == []


@pytest.mark.parametrize("solver", list(CALLS))
def test_committing_asks_the_router_above_its_time_and_once_there(solver: str) -> None:
    ensemble = _routed("commit-0.5")
    sample(ensemble, 10, steps=8, solver=solver)
    asked = ensemble.router.times
    assert len(asked) == 4 * CALLS[solver] + 1
    assert asked[-1] == 0.5
    # Above, all three experts run for each of 10 samples; below, one does.
    assert sum(sum(one.network.rows) for one in ensemble.experts) == 4 * CALLS[solver] * 10 * (
        3 + 1
    )


def test_committing_before_the_first_step_is_drawing_and_after_the_last_is_mixing() -> None:
    ensemble = _routed("commit-1", prior=[1, 2, 3])
    assert torch.equal(sample(ensemble, 8, steps=5), sample(ensemble, 8, steps=5, strategy="draw"))
    late = sample(ensemble, 8, steps=5, strategy="commit-0.01")
    assert torch.equal(late, sample(ensemble, 8, steps=5, strategy="full"))


def test_conditions_are_rows_of_any_kind() -> None:
    ensemble = _routed("top-1", ("class_labels",))
    given = {"steps": 2, "guidance_scale": 2.0}
    negative, labels = {"class_labels": torch.tensor([1, 0])}, torch.tensor([2, 3])
    tensors = sample(ensemble, 2, **given, negative=negative, class_labels=labels)
    for rows in ([2, 3], np.array([2, 3])):
        found = sample(ensemble, 2, **given, negative={"class_labels": [1, 0]}, class_labels=rows)
        assert torch.equal(found, tensors)
    with pytest.raises(HddmError, match="'class_labels' has no rows for 2 samples"):
        sample(ensemble, 2, **given, negative={"class_labels": torch.tensor(2)})
    with pytest.raises(HddmError, match=r"no condition 'clas_labels'.*did you mean 'class_labels'"):
        sample(ensemble, 2, clas_labels=4)
