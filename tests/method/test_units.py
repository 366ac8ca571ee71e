"""Experts with data of their own, z = d x_0 + b, and EDM's, as velocities of the common path."""

import math
from collections.abc import Callable

import pytest
import torch
from diffusers import EDMDPMSolverMultistepScheduler, EDMEulerScheduler
from torch import Tensor

import hddm
from hddm.predictions import PredictionType, from_edm, to_edm
from hddm.schedules import EDMSchedule, from_config, from_diffusers, read_prediction
from hddm.units import Units
from hddm.utils.errors import HddmError
from hddm.utils.records import parse_data_range
from hddm.velocity import VelocityField
from tests.artefacts import refusal
from tests.cases import CASES, LEGAL, LINEAR, Case, case_named, oracle_field
from tests.oracles import GaussianMixture, OracleNetwork, exact_router, relative_error

SHAPE = (2, 2, 2)
DATA = GaussianMixture.random(seed=3, modes=4, dim=8)
UNITS = {
    "pixels-in-0-1": (0.5, 0.5),
    "pixels-to-half": (0.5, 0.0),
    "large-latents": (4.0, 2.0),
    "a-shift-alone": (1.0, -0.7),
    "small-latents": (0.13, torch.tensor([0.3, -1.1], dtype=torch.float64)[:, None, None]),
}
each_units = pytest.mark.parametrize(
    ("scale", "shift"), [pytest.param(*units, id=name) for name, units in UNITS.items()]
)


def moved(data: GaussianMixture, scale: float, shift: float | Tensor = 0.0) -> GaussianMixture:
    """The distribution of ``scale`` x_0 + ``shift``."""
    along = torch.as_tensor(shift, dtype=torch.float64).expand(SHAPE).flatten()
    return GaussianMixture(data.weights, scale * data.means + along, scale**2 * data.covariances)


def own_field(case: Case, kind: str, scale: float, shift: float | Tensor) -> VelocityField:
    """The optimal expert on the moved data; it says how they were moved."""
    network = OracleNetwork(moved(DATA, scale, shift), case.alpha_sigma, kind)
    return VelocityField(network, case.schedule, kind, data_scale=scale, data_shift=shift)


def times_in(field: VelocityField, num: int = 64) -> Tensor:
    low, high = field.range
    noise = torch.Generator().manual_seed(1)
    t = low + (high - low) * torch.rand(num, generator=noise, dtype=torch.float64)
    t[0], t[1] = low, high
    return t


@each_units
@pytest.mark.parametrize(("case", "kind"), LEGAL)
def test_a_perfect_expert_of_moved_data_has_the_velocity_of_the_data(
    case: Case, kind: str, scale: float, shift: float | Tensor
) -> None:
    field = own_field(case, kind, scale, shift)
    t = times_in(field)
    x_t = DATA.states(t, seed=2, shape=SHAPE)
    found, expected = field.velocity(x_t, t), DATA.velocity(x_t, t)
    # Near the ends the native time itself has too few digits.
    well = (t > 0.05) & (t < 0.9)
    assert well.sum() > 32
    assert relative_error(found[well], expected[well]) < 1e-12
    assert relative_error(found, expected) < 1e-8


@each_units
@pytest.mark.parametrize(("case", "kind"), LEGAL)
def test_the_range_in_t_moves_with_the_scale(
    case: Case, kind: str, scale: float, shift: float | Tensor
) -> None:
    field = own_field(case, kind, scale, shift)
    ends = [torch.tensor([time], dtype=torch.float64) for time in (0.0, case.schedule.end)]
    expected = []
    for end in ends:
        a, s = case.alpha_sigma(end)
        expected.append((s / (a * scale + s)).item())
    is_epsilon_without_signal = kind == "epsilon" and expected[1] > 1 - 1e-9
    assert field.range[0] == pytest.approx(expected[0], rel=1e-9, abs=1.1e-6)
    if not is_epsilon_without_signal:
        assert field.range[1] == pytest.approx(expected[1], rel=1e-9)


@each_units
def test_outside_the_range_the_state_is_rescaled_and_moved(
    scale: float, shift: float | Tensor
) -> None:
    case = case_named("sd-scaled-linear")
    field = own_field(case, "v_prediction", scale, shift)
    low, high = field.range
    for t, end in ((low / 3, 0.0), (1 - (1 - high) / 3, case.schedule.end)):
        times = torch.full((8,), t, dtype=torch.float64)
        x_t = DATA.states(times, seed=4, shape=SHAPE)
        field.network.fed.clear()
        v = field.velocity(x_t, times)
        ((y, native),) = field.network.fed
        a, s = (value.item() for value in case.alpha_sigma(torch.tensor([end]).double()))
        wanted = a * (scale * x_t / (1 - t) + shift) if end == 0 else s * x_t / t + a * shift
        torch.testing.assert_close(y, wanted, rtol=1e-9, atol=1e-9)
        assert (native - end).abs().max() < 1e-6
        assert v.isfinite().all()
    for t, sign in ((0.0, -1.0), (1.0, 1.0)):
        x = torch.randn(4, *SHAPE, dtype=torch.float64)
        v = field.velocity(x, torch.full((4,), t))
        torch.testing.assert_close(v, sign * x)


def test_the_velocity_is_continuous_where_the_range_ends() -> None:
    field = own_field(case_named("sd-scaled-linear"), "epsilon", *UNITS["pixels-in-0-1"])
    x = torch.randn(4, *SHAPE, dtype=torch.float64)
    for end in field.range:
        sides = [field.velocity(x, torch.full((4,), end + step)) for step in (-1e-9, 1e-9)]
        torch.testing.assert_close(*sides, rtol=1e-6, atol=1e-6)


def test_units_of_one_leave_every_bit_as_it_is() -> None:
    for case in CASES:
        plain = oracle_field(DATA, case, "v_prediction")
        stated = oracle_field(DATA, case, "v_prediction", data_scale=1.0, data_shift=0.0)
        t = torch.linspace(0, 1, 33, dtype=torch.float64)
        x_t = DATA.states(t, seed=2, shape=SHAPE)
        assert plain.velocity(x_t, t).equal(stated.velocity(x_t, t))


def test_experts_of_unlike_units_and_objectives_mix_exactly() -> None:
    shards = [GaussianMixture.random(seed, 2, 8, spread=0.5) for seed in (11, 12, 13)]
    prior = [0.5, 0.3, 0.2]
    fields = []
    for shard, kind, name, units in zip(
        shards,
        ("epsilon", "sample", "v_prediction"),
        ("ddpm-linear", "cosine", "squaredcos-cap-v2"),
        ("pixels-to-half", "pixels-in-0-1", "small-latents"),
        strict=True,
    ):
        scale, shift = UNITS[units]
        case = case_named(name)
        network = OracleNetwork(moved(shard, scale, shift), case.alpha_sigma, kind)
        fields.append(
            VelocityField(network, case.schedule, kind, data_scale=scale, data_shift=shift)
        )
    whole = GaussianMixture.union(shards, prior)
    ensemble = hddm.Ensemble(fields, exact_router(shards, prior), "full", prior)
    t = torch.linspace(0.05, 0.95, 64, dtype=torch.float64)
    x_t = whole.states(t, seed=5, shape=SHAPE)
    assert relative_error(ensemble.velocity(x_t, t), whole.velocity(x_t, t)) < 1e-12


def test_samples_come_in_the_units_that_experts_share() -> None:
    """An expert of one point gives that point, whatever its own data are."""
    point = torch.tensor([0.25, -0.75]).double()[:, None, None].expand(SHAPE)
    field = VelocityField(
        lambda y, _: (0.5 * point + 0.5).to(y).expand_as(y),
        LINEAR.schedule,
        "sample",
        data_scale=0.5,
        data_shift=0.5,
        sample_shape=SHAPE,
    )
    torch.testing.assert_close(hddm.sample(field, 2, steps=4)[0], point.float())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_scale": 0.0}, "`data_scale` 0.0: must be one number"),
        ({"data_scale": -1.0}, "`data_scale`"),
        ({"data_scale": math.nan}, "`data_scale`"),
        ({"data_scale": torch.ones(4, 1, 1)}, "can be drawn, and not mixed"),
        ({"data_shift": torch.ones(2, 2, 2)}, "`data_shift` of shape (2, 2, 2)"),
        ({"data_shift": torch.ones(3, 1, 1) * torch.arange(3)[:, None, None]}, "3 channels"),
        ({"data_shift": math.inf}, "`data_shift` inf"),
    ],
)
def test_other_units_are_refused_in_one_line(options: dict, words: str) -> None:
    message = refusal(VelocityField, None, LINEAR.schedule, "sample", sample_shape=SHAPE, **options)
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("low", "high", "scale", "shifts"),
    [(-1, 1, 1.0, ()), (0, 1, 0.5, (0.5,)), (-0.5, 0.5, 0.5, ()), (0, 255, 127.5, (127.5,))],
)
def test_a_range_of_pixels_gives_the_units(
    low: float, high: float, scale: float, shifts: tuple[float, ...]
) -> None:
    units = Units.of_range(*parse_data_range(f"{low},{high}"))
    assert (units.scale, units.shifts) == (scale, shifts)
    ends = units.own(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1)).flatten().tolist()
    assert ends == [low, high]


@pytest.mark.parametrize("text", ["1,0", "0,0", "0", "0,1,2", "a,b", "0,inf", "nan,1"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    assert "LOW,HIGH" in refusal(parse_data_range, text)


SIGMAS = [(0.002, 80.0, 0.5), (0.002, 120.0, 1.0), (0.01, 50.0, 2.0)]
each_sigmas = pytest.mark.parametrize(("sigma_min", "sigma_max", "sigma_data"), SIGMAS)


def edm_network(
    data: GaussianMixture, sigma_data: float, sign: float = 1.0
) -> Callable[..., Tensor]:
    """EDM's F by its own definition: D = c_skip x + c_out F, with D the posterior mean."""

    def network(c_in_x: Tensor, c_noise: Tensor) -> Tensor:
        sigma = torch.exp(4 * c_noise.double())
        wide = sigma.view(-1, *[1] * (c_in_x.ndim - 1))
        norm = (wide.square() + sigma_data**2).sqrt()
        x = c_in_x.double() * norm
        denoised, _ = data.x_0_and_eps(x, torch.ones_like(sigma), sigma)
        c_skip, c_out = sigma_data**2 / norm**2, wide * sigma_data / norm
        return sign * (denoised - c_skip * x) / c_out

    return network


@each_sigmas
def test_edm_is_exact(sigma_min: float, sigma_max: float, sigma_data: float) -> None:
    """A network of it predicts v, which is the negative of EDM's own."""
    schedule = EDMSchedule(sigma_min, sigma_max, sigma_data)
    field = VelocityField(edm_network(DATA, sigma_data, -1.0), schedule, "v_prediction")
    ends = (sigma_min / (1 + sigma_min), sigma_max / (1 + sigma_max))
    assert field.range == pytest.approx(ends, rel=1e-12)
    assert schedule.range == pytest.approx(ends, rel=1e-12)
    # F itself, computed from the posterior mean, loses digits where c_out is small.
    t = times_in(field).clamp(min=0.02)
    x_t = DATA.states(t, seed=2, shape=SHAPE)
    assert relative_error(field.velocity(x_t, t), DATA.velocity(x_t, t)) < 1e-12


@each_sigmas
def test_edm_of_moved_data_is_exact(sigma_min: float, sigma_max: float, sigma_data: float) -> None:
    scale, shift = UNITS["small-latents"]
    field = VelocityField(
        edm_network(moved(DATA, scale, shift), sigma_data, -1.0),
        EDMSchedule(sigma_min, sigma_max, sigma_data),
        "v_prediction",
        data_scale=scale,
        data_shift=shift,
    )
    t = times_in(field).clamp(min=0.2)
    x_t = DATA.states(t, seed=2, shape=SHAPE)
    assert relative_error(field.velocity(x_t, t), DATA.velocity(x_t, t)) < 1e-12


def test_edm_is_a_schedule_like_the_others() -> None:
    schedule = EDMSchedule()
    native = torch.linspace(schedule.start, schedule.end, 65, dtype=torch.float64)
    a, s = schedule.alpha(native), schedule.sigma(native)
    sigma = torch.exp(4 * native)
    torch.testing.assert_close(s / a, 2 * sigma, rtol=1e-12, atol=0)
    torch.testing.assert_close(a**2 + s**2, torch.ones_like(a), rtol=1e-14, atol=0)
    torch.testing.assert_close(schedule.time(schedule.log_snr(native)), native)
    assert schedule.time(torch.tensor([math.inf, -math.inf]).double()).tolist() == [
        schedule.start,
        schedule.end,
    ]
    t = sigma / (1 + sigma)
    torch.testing.assert_close(schedule.match(t), native, rtol=1e-12, atol=1e-12)
    assert from_config(schedule.config) == schedule
    assert "native times" in refusal(schedule.alpha, torch.tensor([schedule.start - 0.1]))
    _, slopes = torch.func.jvp(schedule.alpha_sigma, (native,), (torch.ones_like(native),))
    torch.testing.assert_close(slopes, schedule.derivatives(native))


@pytest.mark.parametrize("kind", [EDMEulerScheduler, EDMDPMSolverMultistepScheduler])
@pytest.mark.parametrize(("word", "sign"), [("epsilon", 1.0), ("v_prediction", -1.0)])
def test_schedulers_of_edm_say_what_their_networks_mean(kind: type, word: str, sign: float) -> None:
    """diffusers' own preconditioning of the network's output gives the posterior mean."""
    scheduler = kind(sigma_max=50.0, sigma_data=0.7, prediction_type=word)
    schedule = from_diffusers(scheduler)
    assert schedule == EDMSchedule(0.002, 50.0, 0.7)
    assert from_diffusers({"sigma_data": 0.7, "sigma_max": 50.0}) == schedule
    network = edm_network(DATA, 0.7, sign)
    sigma = torch.tensor([3.0], dtype=torch.float64)
    x = DATA.sample(1, 3, SHAPE) + 3.0 * torch.randn(1, *SHAPE, dtype=torch.float64)
    c_in_x = scheduler.precondition_inputs(x, sigma)
    native = scheduler.precondition_noise(sigma)
    output = network(c_in_x, native)
    denoised = scheduler.precondition_outputs(x, output, sigma)
    expected, eps = DATA.x_0_and_eps(x, torch.ones(1), sigma)
    torch.testing.assert_close(denoised, expected)
    predicts, is_negative = read_prediction(schedule, word)
    assert predicts == "v_prediction"
    field = VelocityField(
        lambda y, u: -network(y, u) if is_negative else network(y, u), schedule, predicts
    )
    found = field.velocity(x / 4, torch.tensor([0.75], dtype=torch.float64))
    torch.testing.assert_close(found, eps - expected)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sigma_data": 0.0}, "sigma_data is 0.0"),
        ({"sigma_min": 90.0}, "sigma_min 90 is not below sigma_max 80"),
        ({"sigma_max": math.inf}, "sigma_max is inf"),
        ({"sigma_max": "80"}, "sigma_max is 80"),
    ],
)
def test_an_impossible_edm_is_refused(values: dict, words: str) -> None:
    assert words in refusal(lambda: EDMSchedule(**values))
    assert words in refusal(from_diffusers, {"_class_name": "EDMEulerScheduler", **values})


def test_edm_predicts_nothing_else() -> None:
    with pytest.raises(HddmError, match="EDM's schedulers know"):
        read_prediction(EDMSchedule(), "sample")


def test_the_words_of_edm_are_written_as_they_are_read() -> None:
    for word in ("epsilon", "v_prediction"):
        assert to_edm(*from_edm(word)) == word
    for kind in PredictionType:
        for is_negated in (True, False):
            written = to_edm(kind, is_negated)
            assert written is None or from_edm(written) == (kind, is_negated)
            assert (written is None) == (kind != "v_prediction")
