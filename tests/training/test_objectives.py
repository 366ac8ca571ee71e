"""Training losses against the least possible, in closed form for Gaussian data; and the inputs of a step."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.optimize import brentq
from scipy.special import logit
from scipy.stats import truncnorm
from torch import Tensor

from hddm.condition_names import TEXT
from hddm.data.shards import ALL, Rows, Shard, TokenStore, join_samples, open_shard
from hddm.schedules import CosineSchedule, EDMSchedule, Schedule
from hddm.training.loader import Order
from hddm.training.objectives import Objective, drawing
from hddm.units import Units
from hddm.utils.streams import Use
from hddm.utils.tensors import append_dims
from hddm.velocity import VelocityField
from tests.artefacts import expert_recipe, objective_named, refusal, with_pixels
from tests.cases import Case, case_named
from tests.component_files import write_clip, write_vae
from tests.oracles import GaussianMixture, OracleNetwork, predicted
from tests.shard_files import encode, noise, write_shard

VARIANCE, SHAPE, NUM = 0.5, (1, 4, 4), 20_000
GAUSSIAN = GaussianMixture(
    torch.ones(1).double(),
    torch.full((1, 16), 0.7).double(),
    VARIANCE * torch.eye(16).double()[None],
)
DDPM_CASES = ["cosine", "linear", "ddpm-linear", "sd-scaled-linear-ztsnr", "squaredcos-cap-v2"]


def _noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _least_ddpm_loss(case: Case) -> float:
    """E over the schedule's times of Var(eps | y) = a² c/(a² c + s²)."""
    end = case.schedule.end
    time = torch.arange(end + 1) if end > 1 else (torch.arange(100_000) + 0.5) / 100_000
    a, s = case.alpha_sigma(time.double())
    return (a**2 * VARIANCE / (a**2 * VARIANCE + s**2)).mean().item()


def _excess(objective: Objective, case: Case, kind: str, least: float) -> None:
    """The loss of the exact network is the ``least``; a constant added to its output adds its square."""
    best = OracleNetwork(GAUSSIAN, case.alpha_sigma, kind, objective.time_scale)
    noise, x_0 = _noise(), GAUSSIAN.sample(NUM, 1, SHAPE).float()
    time, eps = objective.sample_times(NUM, noise), torch.randn(x_0.shape, generator=noise)
    for bias in (0.0, 0.3):
        loss = objective.errors(lambda y, u, bias=bias: best(y, u) + bias, x_0, eps, time, {})
        error = loss.std().item() / NUM**0.5
        assert loss.shape == (NUM,)
        assert abs(loss.mean().item() - least - bias**2) < 4 * error
        assert error < 0.01


@pytest.mark.parametrize("name", DDPM_CASES)
def test_the_optimal_noise_network_reaches_the_least_ddpm_loss(name: str) -> None:
    case = case_named(name)
    objective = objective_named("ddpm", case.schedule, prediction="epsilon")
    assert objective.time_scale == (1.0 if case.schedule.end > 1 else 1000.0)
    _excess(objective, case, "epsilon", _least_ddpm_loss(case))


@pytest.mark.parametrize("sampling", ["uniform", "logit-normal"])
def test_the_optimal_velocity_network_reaches_the_least_flow_loss(sampling: str) -> None:
    """Var(eps - x_0 | x_t) = c/((1-t)² c + t²), whose integral over t is pi sqrt(c)/2."""
    objective = objective_named("flow", time_sampling=sampling, prediction="flow_prediction")
    least = math.pi * VARIANCE**0.5 / 2
    if sampling == "logit-normal":
        logit = torch.linspace(-8, 8, 200_001, dtype=torch.float64)
        t, density = logit.sigmoid(), torch.exp(-(logit**2) / 2)
        values = VARIANCE / ((1 - t) ** 2 * VARIANCE + t**2)
        least = (values * density).sum().item() / density.sum().item()
    _excess(objective, case_named("linear"), "flow_prediction", least)


@pytest.mark.parametrize(
    ("name", "prediction"),
    [
        ("linear", "epsilon"),
        ("linear", "sample"),
        ("linear", "v_prediction"),
        ("linear", "flow_prediction"),
        ("cosine", "epsilon"),
        ("cosine", "sample"),
        ("ddpm-linear", "v_prediction"),
    ],
)
def test_loss_in_velocity_is_the_error_of_the_converted_velocity(
    name: str, prediction: str
) -> None:
    """Between the bounds, for a network that is wrong by a constant; beyond them as at the bound of 0.05."""
    case = case_named(name)
    kind = "flow" if name == "linear" else "ddpm"
    objective = objective_named(kind, case.schedule, prediction=prediction, weighting="velocity")
    best = OracleNetwork(GAUSSIAN, case.alpha_sigma, prediction, objective.time_scale)
    x_0, eps = GAUSSIAN.sample(64, 1, SHAPE), torch.randn(64, *SHAPE, generator=_noise()).double()
    t = torch.linspace(0.06, 0.94, 64, dtype=torch.float64)
    time = case.schedule.match(t)
    field = VelocityField(
        lambda y, u: best(y, u) + 0.3, case.schedule, prediction, objective.time_scale
    )
    a = append_dims(t, 4)
    velocity = field.velocity((1 - a) * x_0 + a * eps, t)
    expected = (velocity - (eps - x_0)).square().flatten(1).mean(1)
    found = objective.errors(lambda y, u: best(y, u) + 0.3, x_0, eps, time, {})
    torch.testing.assert_close(found, expected.float(), rtol=2e-4, atol=1e-6)
    t = torch.tensor([0.0, 0.02, 0.98, 1.0], dtype=torch.float64)
    weighted, plain = (
        objective_named(kind, case.schedule, prediction=prediction, weighting=weighting).errors(
            lambda y, u: torch.zeros_like(y), x_0[:4], eps[:4], case.schedule.match(t), {}
        )
        for weighting in ("velocity", "prediction")
    )
    if prediction == "sample":
        torch.testing.assert_close(weighted[:2], 400 * plain[:2], rtol=1e-3, atol=0)
    if prediction == "epsilon":
        torch.testing.assert_close(weighted[2:], 400 * plain[2:], rtol=1e-3, atol=0)
    assert weighted.isfinite().all()


@pytest.mark.parametrize("units", [Units(0.5, 0.5), Units(4.0, -1.0)])
@pytest.mark.parametrize(
    ("schedule", "prediction"),
    [
        (CosineSchedule(), "epsilon"),
        (CosineSchedule(), "sample"),
        (CosineSchedule(), "v_prediction"),
        (EDMSchedule(1e-3, 1e3, 0.7), "v_prediction"),
        (EDMSchedule(1e-3, 1e3, 0.7), "sample"),
    ],
)
def test_loss_in_velocity_is_that_of_common_units_for_experts_with_their_own(
    schedule: Schedule, prediction: str, units: Units
) -> None:
    objective = objective_named("ddpm", schedule, prediction=prediction, weighting="velocity")
    objective = replace(objective, units=units)
    x_0, eps = GAUSSIAN.sample(64, 1, SHAPE), torch.randn(64, *SHAPE, generator=_noise()).double()
    t = torch.linspace(0.06, 0.94, 64, dtype=torch.float64)
    time = schedule.match(t, objective.path_units.scale)
    torch.testing.assert_close(objective.common_time(time), t)
    fed = []

    def wrong(y: Tensor, timestep: Tensor) -> Tensor:
        """What a perfect network gives for these x_0 and eps, and a constant."""
        fed.append(y)
        a, s = (append_dims(one, 4) for one in schedule.alpha_sigma(time))
        return predicted(prediction, objective.path_units.own(x_0), eps, a, s) + 0.3

    field = VelocityField(
        wrong,
        schedule,
        prediction,
        objective.time_scale,
        data_scale=units.scale,
        data_shift=units.shift,
    )
    wide = append_dims(t, 4)
    velocity = field.velocity((1 - wide) * x_0 + wide * eps, t)
    expected = (velocity - (eps - x_0)).square().flatten(1).mean(1)
    found = objective.errors(wrong, x_0, eps, time, {})
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fed[0], fed[1])


@pytest.mark.parametrize("name", ["ddpm", "flow"])
@pytest.mark.parametrize("sampling", ["uniform", "logit-normal"])
def test_continuous_times_are_uniform_or_have_normal_logits(name: str, sampling: str) -> None:
    objective = objective_named(name, time_sampling=sampling)
    time = objective.sample_times(NUM, _noise()).sort()[0]
    cdf = time if sampling == "uniform" else torch.special.ndtr(objective.common_time(time).logit())
    uniform = (torch.arange(NUM, dtype=torch.float64) + 0.5) / NUM
    # Kolmogorov-Smirnov: 1.95/sqrt(n) is passed once in a thousand seeds.
    assert (cdf - uniform).abs().max() < 1.95 / NUM**0.5


@pytest.mark.parametrize("part", [(0.5, 1.0), (0.0, 0.5), (0.3, 0.875)], ids=str)
@pytest.mark.parametrize(("name", "schedule"), [("flow", "linear"), ("ddpm", "cosine")])
def test_a_part_of_t_is_drawn_by_the_inverse_distribution_of_all(
    name: str, schedule: str, part: tuple[float, float]
) -> None:
    """Of a normal logit by scipy's truncated one, of uniform native times by their ends."""
    case, uniform = case_named(schedule), torch.rand(NUM, generator=_noise(), dtype=torch.float64)
    objective = objective_named(name, case.schedule, "logit-normal", noise_range=part)
    t = objective.common_time(objective.sample_times(NUM, _noise()))
    expected = torch.from_numpy(truncnorm.ppf(uniform.numpy(), *logit(part)))
    torch.testing.assert_close(t, expected.sigmoid(), rtol=1e-9, atol=1e-9)
    ends = [brentq(lambda u, t=t: case.common_time(u) - t, 0, 1) for t in part]
    native = objective_named(name, case.schedule, noise_range=part).sample_times(NUM, _noise())
    torch.testing.assert_close(
        native, ends[0] + uniform * (ends[1] - ends[0]), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("sampling", ["uniform", "logit-normal"])
@pytest.mark.parametrize("name", ["ddpm-linear", "trained-betas-ztsnr"])
def test_a_discrete_schedule_and_two_parts_of_it_draw_whole_indices(
    name: str, sampling: str
) -> None:
    """An index is of the part that its t is in, and as frequent there as among all of that part."""
    case, boundary = case_named(name), 0.6
    schedule = case.schedule
    indices = torch.arange(int(schedule.end) + 1)
    t = torch.tensor([case.common_time(index) for index in indices.double().tolist()])
    whole = torch.ones(len(indices), dtype=torch.float64)
    if sampling == "logit-normal":
        halves = torch.tensor(
            [0.0, *(case.common_time(i + 0.5) for i in indices[:-1].tolist()), 1.0]
        ).double()
        whole = torch.special.ndtr(halves.logit()).diff()
    parts = (
        ((boundary, 1.0), t >= boundary),
        ((0.0, boundary), t < boundary),
        ((0.0, 1.0), t >= 0),
    )
    for part, rows in parts:
        objective = objective_named("ddpm", schedule, sampling, noise_range=part)
        time = objective.sample_times(400 * len(indices), _noise())
        assert torch.equal(time, time.round())
        counts = time.long().bincount(minlength=len(indices))
        assert counts[~rows].sum() == 0
        expected = whole * rows / whole[rows].sum() * len(time)
        # As many deviations as one of a thousand counts is off in one of ten million seeds.
        assert ((counts - expected).abs() <= 6.5 * (expected.sqrt() + 1)).all()


def test_combinations_without_meaning_are_refused() -> None:
    assert "is for DDPM" in refusal(objective_named, "flow", case_named("cosine").schedule)
    assert "for flow matching" in refusal(objective_named, "ddpm", prediction="flow_prediction")


@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_weighs_each_sample_by_its_noise_level(gamma: float) -> None:
    """min(SNR, gamma)/SNR written out, on a network that always says 0; the ends of the path are included."""
    objective = objective_named("ddpm", snr_gamma=gamma, prediction="epsilon")
    time = torch.tensor([0.0, 0.01, 0.2, 0.5, 0.8, 1.0], dtype=torch.float64)
    eps = torch.ones(6, 1, 2, 2)
    found = objective.errors(lambda x, t: torch.zeros_like(x), eps * 0.3, eps, time, {})
    angle = time * torch.pi / 2
    snr = (angle.cos() / angle.sin()) ** 2
    expected = torch.where(snr <= gamma, 1.0, gamma / snr)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-6)


FLOW = objective_named("flow")


EXPERT = (Use.EXPERT_ORDER, Use.EXPERT_STEPS, 2)


@pytest.fixture
def shard(whole: Path) -> Shard:
    return open_shard(whole)


@pytest.mark.parametrize(("num", "batch"), [(7, 3), (8, 4), (5, 12), (1, 1)])
def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own(num: int, batch: int) -> None:
    order = Order(num, batch, seed=3, key=EXPERT)
    stream = torch.cat([order.rows(step) for step in range(1, 4 * num + 1)])
    epochs = stream[: len(stream) // num * num].view(-1, num)
    assert (epochs.sort(1).values == torch.arange(num)).all()
    if num > 4:
        assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1


def test_a_step_does_not_depend_on_the_steps_before_it() -> None:
    whole, alone = (Order(10, 4, seed=0, key=EXPERT) for _ in range(2))
    rows = [whole.rows(step) for step in range(1, 30)]
    assert torch.equal(alone.rows(17), rows[16])
    first, again = (torch.randn(3, generator=alone.draws(17)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.randn(3, generator=alone.draws(18)))
    for key in ((*EXPERT[:2], 3), (Use.ROUTER_ORDER, Use.ROUTER_STEPS, 2)):
        other = Order(10, 4, seed=0, key=key)
        assert not torch.equal(torch.cat([other.rows(s) for s in range(1, 30)]), torch.cat(rows))


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_all_conditions_of_a_sample_are_dropped_at_once(shard: Shard, probability: float) -> None:
    settings = expert_recipe("flow", condition_dropout=probability)
    given = {"class_labels": torch.arange(len(shard)) % 5, "size": torch.ones(len(shard), 2)}
    nulls = {"class_labels": torch.tensor(5), "size": torch.tensor([-1.0, -2.0])}
    draw = drawing(shard, objective_named("ddpm"), settings, given, nulls)
    rows = torch.arange(len(shard)).repeat(50)
    drawn = draw(rows, torch.Generator().manual_seed(0), ALL)
    angle = drawn["time"] * torch.pi / 2
    torch.testing.assert_close(
        drawn["t"], angle.sin() / (angle.sin() + angle.cos()), rtol=1e-6, atol=1e-9
    )
    gone = drawn["class_labels"] == 5
    spread = (probability * (1 - probability) / len(rows)) ** 0.5
    assert abs(gone.double().mean().item() - probability) <= 4 * spread
    assert torch.equal(drawn["class_labels"][~gone], given["class_labels"][rows][~gone])
    assert (drawn["size"] == torch.where(gone[:, None], nulls["size"], torch.ones(2))).all()


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_have_together_what_one_draws(processes: int, tmp_path: Path) -> None:
    """Latents drawn from the posterior, of two stores, mirrored or not, with captions and labels."""
    write_shard(tmp_path / "source", noise(24), None, [str(n) for n in range(24)])
    write_vae(tmp_path / "vae")
    write_clip(tmp_path, tokens=8)
    networks = {name: tmp_path / name for name in ("vae", "text_encoder", "tokenizer")}
    shard = open_shard(
        encode(tmp_path / "source", tmp_path / "out", 10, random_flip=True, **networks)
    )
    assert shard.texts is not None
    texts = TokenStore(Rows(shard.texts.tokens.parts * 2), shard.texts.null)
    shard = replace(shard, stored=join_samples([shard.stored] * 2), texts=texts)
    settings = expert_recipe("flow", random_flip=True, text_conditional=True, condition_dropout=0.3)
    given = {"class_labels": torch.arange(48) % 5}
    nulls = {"class_labels": torch.tensor(5), TEXT: texts.null}
    draw, rows = drawing(shard, FLOW, settings, given, nulls), torch.arange(48).flip(0)[:36]
    whole, number = draw(rows, torch.Generator().manual_seed(1), ALL), 36 // processes
    parts = [
        draw(rows, torch.Generator().manual_seed(1), slice(k * number, (k + 1) * number))
        for k in range(processes)
    ]
    assert whole.keys() == {"x_0", "eps", "time", "t", "class_labels", TEXT}
    for name, value in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)


def test_half_the_images_are_mirrored_where_that_is_asked_for(shard: Shard) -> None:
    ramp = torch.arange(len(shard) * 16, dtype=torch.uint8).view(len(shard), 1, 4, 4)
    shard = with_pixels(shard, ramp)
    rows = torch.arange(len(shard)).repeat(40)

    def images(flip: bool) -> Tensor:
        settings = expert_recipe("flow", random_flip=flip)
        return drawing(shard, FLOW, settings, {}, {})(rows, torch.Generator().manual_seed(1), ALL)[
            "x_0"
        ]

    plain = shard.take(rows)
    assert torch.equal(images(False), plain)
    mirrored = (images(True) == plain.flip(-1)).flatten(1).all(1)
    kept = (images(True) == plain).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert abs(mirrored.double().mean().item() - 0.5) < 4 * 0.5 / len(rows) ** 0.5
