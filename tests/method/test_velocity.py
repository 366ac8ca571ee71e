"""Exact conversion in an expert's noise range, one rule outside it, and how an expert is called."""

import pytest
import torch
from torch import Tensor

from hddm.ensemble import Ensemble
from hddm.networks.wrappers import declared_shape
from hddm.predictions import PredictionType
from hddm.sampling import sample
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.artefacts import refusal
from tests.cases import (
    DISCRETE,
    LEGAL,
    LINEAR,
    Case,
    ConditionSum,
    case_named,
    each_legal,
    oracle_field,
)
from tests.checkpoint_files import plain_unet
from tests.oracles import (
    BoundedNetwork,
    GaussianMixture,
    OracleNetwork,
    Recorder,
    relative_error,
    solved,
)

SHARD = GaussianMixture.random(seed=0, modes=5, dim=8)
SHAPE = (2, 2, 2)


def _inside(field: VelocityField, num: int = 64) -> torch.Tensor:
    """Times in the range: both ends, the rest at random."""
    low, high = field.range
    noise = torch.Generator().manual_seed(1)
    t = low + (high - low) * torch.rand(num, generator=noise, dtype=torch.float64)
    t[0], t[1] = low, high
    return t


@each_legal
def test_a_perfect_expert_becomes_the_velocity_of_the_linear_path(
    case: Case, prediction_type: str
) -> None:
    """And the network is fed the rescaled state at the matched time."""
    field = oracle_field(SHARD, case, prediction_type)
    t = _inside(field)
    x_t = SHARD.states(t, seed=2, shape=SHAPE)
    assert relative_error(field.velocity(x_t, t), SHARD.velocity(x_t, t)) < 1e-9
    ((y, u),) = field.network.fed
    a, s = (value.view(-1, 1, 1, 1) for value in case.alpha_sigma(u))
    torch.testing.assert_close((s / (a + s)).flatten(), t, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(y, (a + s) * x_t, rtol=1e-9, atol=1e-12)


@each_legal
def test_time_scale_multiplies_what_the_network_is_fed(case: Case, prediction_type: str) -> None:
    plain, scaled = (oracle_field(SHARD, case, prediction_type, scale) for scale in (1.0, 1000.0))
    t = _inside(plain, 8)
    x_t = SHARD.states(t, seed=4, shape=SHAPE)
    torch.testing.assert_close(scaled.velocity(x_t, t), plain.velocity(x_t, t), rtol=1e-8, atol=0)
    torch.testing.assert_close(scaled.network.fed[0][1], 1000 * plain.network.fed[0][1])


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_the_same_x_at_the_same_t_would_be_wrong(prediction_type: str) -> None:
    # The reading of the paper that skips matching: the oracle must tell it from the exact one.
    case = case_named("cosine")
    t = torch.full((256,), 0.25, dtype=torch.float64)
    x_t = SHARD.states(t, seed=5, shape=SHAPE)
    output = OracleNetwork(SHARD, case.alpha_sigma, prediction_type)(x_t, t)
    unmatched = VelocityField(lambda y, u: output, LINEAR.schedule, prediction_type)
    assert relative_error(unmatched.velocity(x_t, t), SHARD.velocity(x_t, t)) > 0.1


@pytest.mark.parametrize(
    "case", [c for c in DISCRETE if c.name.endswith("ztsnr")], ids=lambda case: case.name
)
def test_epsilon_with_zero_terminal_snr_ends_at_the_last_index_with_signal(case: Case) -> None:
    end = case.schedule.end
    epsilon, v = (oracle_field(SHARD, case, kind).range for kind in ("epsilon", "v_prediction"))
    assert epsilon[1] == pytest.approx(case.common_time(end - 1), rel=1e-12)
    assert epsilon[1] < 1.0 == v[1]
    assert epsilon[0] == v[0] == pytest.approx(case.common_time(0.0), rel=1e-10)


@each_legal
def test_range_is_the_schedule_s_but_for_a_margin_at_singularities(
    case: Case, prediction_type: str
) -> None:
    low, high = oracle_field(SHARD, case, prediction_type).range
    assert 0 <= low < high <= 1
    expected_low, expected_high = (case.common_time(time) for time in (0.0, case.schedule.end))
    assert low == pytest.approx(expected_low, abs=1.1e-6)
    is_of_noise = PredictionType(prediction_type).prediction.is_of_noise
    if not (is_of_noise and case.name.endswith("ztsnr")):
        assert high == pytest.approx(expected_high, abs=1.1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_flow_prediction_on_the_linear_path_is_the_network_s_output_bit_for_bit(
    dtype: torch.dtype,
) -> None:
    """And the state and the times are what it is fed."""
    fed: list[torch.Tensor] = []
    noise = torch.Generator().manual_seed(0)
    t = torch.cat(
        [torch.tensor([0.0, 1.0]).double(), torch.rand(998, generator=noise).double() ** 3]
    )
    x_t, output = torch.randn(2, len(t), 3, 2, 2, generator=noise, dtype=dtype)
    field = VelocityField(
        lambda *given: fed.extend(given) or output, LINEAR.schedule, "flow_prediction"
    )
    assert torch.equal(field.velocity(1e6 * x_t, t), output)
    assert torch.equal(fed[0], 1e6 * x_t)
    assert torch.equal(fed[1], t.to(dtype))


@each_legal
def test_each_sample_has_its_own_time_when_batch_equals_width(
    case: Case, prediction_type: str
) -> None:
    shard = GaussianMixture.random(seed=1, modes=2, dim=16)
    field = oracle_field(shard, case, prediction_type)
    t = torch.tensor([0.0, 0.2, 0.7, 1.0], dtype=torch.float64)
    x_t = shard.states(t, seed=7, shape=(1, 4, 4))
    together = field.velocity(x_t, t)
    alone = torch.cat([field.velocity(x_t[i : i + 1], t[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


SIZE = (2, 4, 4)
T = torch.tensor([0.0, 0.2, 0.7, 1.0])


def _states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(len(T), *SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)


LABELS, NULL = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 0, 0, 0])


@pytest.mark.parametrize(
    ("declared", "given", "scale", "negative", "problem"),
    [
        ("class_labels", {"caption": LABELS}, 1.0, None, r"'caption'.*declares: class_labels"),
        ("class_labels", {"class_labels": LABELS}, 2.0, {"caption": NULL}, "'caption'"),
        # Where nothing guides too.
        (
            "class_labels",
            {"class_labels": LABELS},
            1.0,
            {"bogus": NULL},
            r"'bogus'.*declares: class_labels",
        ),
        ("class_labels", {"class_labels": LABELS[:3]}, 1.0, None, r"class_labels.*4 samples"),
        ("", {"class_labels": LABELS}, 1.0, None, "declares: none"),
        ("class_labels", {}, 1.0, None, "needs class_labels"),
    ],
    ids=["given", "negative", "unguided", "few", "none declared", "one missing"],
)
def test_other_conditions_than_the_declared_are_refused(
    declared: str,
    given: dict[str, Tensor],
    scale: float,
    negative: dict[str, Tensor] | None,
    problem: str,
) -> None:
    with pytest.raises(HddmError, match=problem):
        ConditionSum().field(*declared.split()).velocity(_states(), T, scale, negative, **given)


def test_an_unknown_keyword_may_be_meant_for_an_argument_of_the_call() -> None:
    field = ConditionSum().field("hue")
    for call in (field.velocity, Ensemble([field], strategy="full").velocity):
        told = refusal(call, _states(), T, guidance=3.0)
        assert told.endswith(
            "no condition 'guidance'; it declares: hue; did you mean 'guidance_scale'?"
        )


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["ddpm-linear", "cosine", "linear"])
def test_times_reach_the_network_in_float32_with_their_fractions(
    name: str, weights: torch.dtype
) -> None:
    schedule = case_named(name).schedule
    network = Recorder(weights)
    scale = 1.0 if name == "ddpm-linear" else 1000.0
    t = torch.full((3,), 0.4567891, dtype=torch.float64)
    VelocityField(network, schedule, "epsilon", scale).velocity(_states()[:3], t)
    ((y, timestep),) = network.fed
    exact = schedule.match(t) * scale
    assert y.dtype == weights
    assert timestep.dtype == torch.float32
    torch.testing.assert_close(timestep.double(), exact, rtol=2.0**-24, atol=0)
    assert (timestep.frac() > 0.01).all()


def test_times_reach_the_network_in_float64_for_a_float64_state_and_float32_for_a_half() -> None:
    network = Recorder(torch.float32)
    t = torch.tensor([1 / 3], dtype=torch.float64)
    field = VelocityField(network, LINEAR.schedule, "flow_prediction", 1000.0)
    field.velocity(_states(torch.float64)[:1], t)
    ((y, timestep),) = network.fed
    assert y.dtype == torch.float32
    assert timestep.dtype == torch.float64
    assert timestep.item() == 1000 / 3
    v = field.velocity(_states(torch.bfloat16), T)
    assert network.fed[1][0].dtype == network.fed[1][1].dtype == torch.float32
    assert torch.equal(v, field.velocity(_states(torch.bfloat16).float(), T).to(torch.bfloat16))


@pytest.mark.parametrize(
    "t",
    [[-0.001, 0, 0, 0], [0, 0, 0, 1.001], [0, float("nan"), 0, 0], [0.5], [0.5] * 5, [[0.5] * 4]],
    ids=["below 0", "above 1", "nan", "too few", "too many", "two-dimensional"],
)
def test_other_times_are_refused(t: list[float]) -> None:
    field = VelocityField(BoundedNetwork(), LINEAR.schedule, "flow_prediction")
    with pytest.raises(HddmError, match=r"^t "):
        field.velocity(_states(), torch.tensor(t, dtype=torch.float64))


def test_flow_prediction_on_a_discrete_schedule_is_refused() -> None:
    with pytest.raises(HddmError, match="flow_prediction needs"):
        VelocityField(BoundedNetwork(), case_named("ddpm-linear").schedule, "flow_prediction")


def test_outputs_of_diffusers_and_tuples_are_the_tensor_in_them() -> None:
    network = plain_unet()
    states = torch.randn(4, *declared_shape(network), generator=torch.Generator().manual_seed(0))
    plain = VelocityField(lambda y, t: network(y, t).sample, LINEAR.schedule, "epsilon")
    with torch.no_grad():
        v = plain.velocity(states, T)
        for form in (network, lambda y, t: network(y, t, return_dict=False)):
            assert torch.equal(
                VelocityField(form, LINEAR.schedule, "epsilon").velocity(states, T), v
            )
    for output, found in ((None, "a NoneType"), (states.repeat(1, 2, 1, 1), r"\(4, 6, 8, 8\)")):
        field = VelocityField(lambda y, t, one=output: one, LINEAR.schedule, "epsilon")
        with pytest.raises(HddmError, match=f"the network returned {found} for a state of"):
            field.velocity(states, T)


@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0])], ids=str
)
def test_labels_that_are_no_classes_are_refused(labels: Tensor) -> None:
    nulls, classes = {"class_labels": torch.tensor(2)}, ("cat", "dog")
    field = ConditionSum().field("class_labels", null_conditions=nulls, classes=classes)
    with pytest.raises(HddmError, match="whole numbers from 0 to 2"):
        field.velocity(_states()[:2], T[:2], class_labels=labels)
    assert field.velocity(_states()[:2], T[:2], class_labels=torch.tensor([0, 2])).isfinite().all()
    # Two classes alone, beside an expert whose third number is no class: the larger range covers the labels.
    alone = ConditionSum().field("class_labels", classes=classes)
    told = "whole numbers from 0 to 1"
    given = {
        "class_labels": torch.tensor([0, 1]),
        "negative": {"class_labels": torch.tensor([2, 2])},
    }
    with pytest.raises(HddmError, match=told):
        sample(
            Ensemble([alone, field]),
            2,
            steps=1,
            expert=0,
            guidance_scale=2.0,
            shape=(3, 8, 8),
            **given,
        )


WIDE = (3, 4, 4)
WIDE_SHARD = GaussianMixture.random(seed=0, modes=3, dim=48)
DTYPES = [torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


def _ends_below_one(case: Case, prediction_type: str) -> bool:
    has_zero_snr = case.name in ("linear", "cosine") or case.name.endswith("ztsnr")
    return PredictionType(prediction_type).prediction.is_of_noise or not has_zero_snr


def _starts_above_zero(case: Case, prediction_type: str) -> bool:
    is_singular = PredictionType(prediction_type).prediction.is_singular_at_data
    return is_singular or case.name not in ("linear", "cosine")


each_end = pytest.mark.parametrize(
    ("case", "prediction_type", "is_above"),
    [
        pytest.param(*one.values, is_above, id=f"{one.id}-{'above' if is_above else 'below'}")
        for is_above, is_inside in ((True, _ends_below_one), (False, _starts_above_zero))
        for one in LEGAL
        if one.values[1] != "flow_prediction" and is_inside(*one.values)
    ],
)


def _fields(case: Case, prediction_type: str) -> list[VelocityField]:
    """Any expert, and the perfect one."""
    anyone = VelocityField(BoundedNetwork(), case.schedule, prediction_type)
    return [anyone, oracle_field(WIDE_SHARD, case, prediction_type)]


def _noise(t: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    noise = torch.Generator().manual_seed(0)
    return torch.randn(len(t), *WIDE, generator=noise, dtype=torch.float64).to(dtype)


@each_legal
@each_dtype
def test_velocity_is_finite_everywhere(
    case: Case, prediction_type: str, dtype: torch.dtype
) -> None:
    low, high = case.schedule.range
    zero, one = torch.tensor(0.0, dtype=dtype), torch.tensor(1.0, dtype=dtype)
    edges = torch.stack([zero, zero.nextafter(one), one.nextafter(zero), one])
    around = [1e-30, 1e-12, 1e-6, low, 0.3, high, 1 - 1e-6, 1 - 1e-7]
    t = torch.cat([edges, torch.tensor(around, dtype=dtype), torch.linspace(0, 1, 21, dtype=dtype)])
    for field in _fields(case, prediction_type):
        v = field.velocity(_noise(t, dtype), t)
        assert v.dtype == dtype
        assert v.isfinite().all()


@each_legal
@each_dtype
def test_velocity_at_full_noise_is_bounded(
    case: Case, prediction_type: str, dtype: torch.dtype
) -> None:
    t = torch.ones(32, dtype=dtype)
    x_t = _noise(t, dtype)
    for field in _fields(case, prediction_type):
        v = field.velocity(x_t, t)
        assert (v.flatten(1).norm(dim=1) <= 3 * x_t.flatten(1).norm(dim=1)).all()


@each_legal
def test_float32_states_lose_no_more_than_rounding(case: Case, prediction_type: str) -> None:
    t = torch.cat([torch.linspace(0, 1, 201), 1 - torch.logspace(-7, -2, 30)])
    x_t = WIDE_SHARD.states(t, seed=3, shape=WIDE)
    field = oracle_field(WIDE_SHARD, case, prediction_type)
    narrow, wide = field.velocity(x_t.float(), t), field.velocity(x_t, t)
    # State and timestep are rounded to 6e-8; dividing by 1 - t or t multiplies the former.
    prediction = PredictionType(prediction_type).prediction
    growth = torch.zeros_like(t)
    if prediction.is_of_noise:
        growth = growth + 1 / (1 - t).clamp_min(1e-6)
    if prediction.is_singular_at_data:
        growth = growth + 1 / t.clamp_min(1e-6)
    bound = 1e-5 + 1e-6 * growth
    error = (narrow - wide).flatten(1).norm(dim=1) / x_t.flatten(1).norm(dim=1)
    assert (error <= bound).all()


@each_legal
def test_gradients_are_finite_on_the_closed_interval(case: Case, prediction_type: str) -> None:
    field = VelocityField(BoundedNetwork(), case.schedule, prediction_type)
    t = torch.tensor([0.0, 1e-12, 0.3, 1 - 1e-12, 1.0], dtype=torch.float64)
    x_t = _noise(t).requires_grad_()
    field.velocity(x_t, t).square().sum().backward()
    assert x_t.grad.isfinite().all()


@each_legal
def test_velocity_of_data_is_minus_the_data_for_a_perfect_expert(
    case: Case, prediction_type: str
) -> None:
    t = torch.zeros(8, dtype=torch.float64)
    x_t = WIDE_SHARD.sample(8, seed=0, shape=WIDE)
    v = oracle_field(WIDE_SHARD, case, prediction_type).velocity(x_t, t)
    torch.testing.assert_close(v, -x_t, rtol=1e-9, atol=1e-9)


@each_end
def test_beyond_the_range_one_estimate_fades(
    case: Case, prediction_type: str, is_above: bool
) -> None:
    network = BoundedNetwork()
    field = VelocityField(network, case.schedule, prediction_type)
    end = field.range[is_above]
    shares = torch.tensor([0.0, 0.1, 0.5, 0.8, 0.999], dtype=torch.float64)
    t = 1 - (1 - end) * shares if is_above else end * shares
    x_t = _noise(t)
    v = field.velocity(x_t, t)
    ((y, u, output),) = network.calls
    asked = case.schedule.match(torch.tensor([end], dtype=torch.float64))
    torch.testing.assert_close(u, asked.expand(5), rtol=1e-6, atol=1e-9)
    assert (u == u[0]).all()
    t = t.view(-1, 1, 1, 1)
    a, s = (value.view(-1, 1, 1, 1) for value in case.alpha_sigma(u))
    torch.testing.assert_close(y, (s / t if is_above else a / (1 - t)) * x_t, rtol=1e-9, atol=0)
    x_0, eps = solved(prediction_type, output, y, a, s)
    odds = (1 - t) / t / ((1 - end) / end)
    expected = (x_t - odds * x_0) / t if is_above else (eps / odds - x_t) / (1 - t)
    torch.testing.assert_close(v, expected, rtol=1e-7, atol=1e-7)


@each_legal
def test_outside_the_range_the_rule_is_right_to_first_order(
    case: Case, prediction_type: str
) -> None:
    # For centred data the error is of second order in the smaller of (alpha, sigma) at the end.
    eye = 0.5 * torch.eye(48, dtype=torch.float64)
    centred = GaussianMixture(torch.ones(1).double(), torch.zeros(1, 48).double(), eye[None])
    field = oracle_field(centred, case, prediction_type)
    low, high = field.range
    t = torch.cat([torch.linspace(0, low, 9), torch.linspace(high, 1, 9)]).double().clamp(0, 1)
    x_t = centred.states(t, seed=2, shape=WIDE)
    share = max(low / (1 - low), (1 - high) / high)
    bound = 2 * share**2 + 1e-6
    assert relative_error(field.velocity(x_t, t), centred.velocity(x_t, t)) < bound


def test_states_of_other_channels_are_refused_in_one_line() -> None:
    field = ConditionSum().field(sample_shape=SHAPE)
    for model in (
        field,
        Ensemble([field, field], lambda x, t: x.new_full((len(x), 2), 0.5), "full"),
    ):
        for shape in ((3, 5, 2, 2), (3, 8), (2, 2, 2)):
            told = f"x_t has shape {shape}; this model takes states (batch, 2, H, W)"
            assert refusal(model.velocity, torch.zeros(shape), 0.5) == told
        assert model.velocity(torch.zeros(3, 2, 6, 4), torch.tensor(0.5)).shape == (3, 2, 6, 4)


CHECKED = GaussianMixture.random(seed=3, modes=3, dim=4)


def test_moments_are_those_of_the_samples() -> None:
    data = CHECKED.sample(200_000, seed=0)
    torch.testing.assert_close(data.mean(0), CHECKED.mean, atol=0.02, rtol=0)
    torch.testing.assert_close(data.T.cov(), CHECKED.covariance, atol=0.04, rtol=0)


def test_noise_estimate_is_the_score_by_tweedies_formula() -> None:
    y = CHECKED.sample(16, seed=1).requires_grad_()
    a, s = torch.linspace(0.1, 1, 16, dtype=torch.float64), torch.linspace(2, 0.05, 16).double()
    (score,) = torch.autograd.grad(CHECKED.log_density(y, a, s).sum(), y)
    x_0, eps = CHECKED.x_0_and_eps(y.detach(), a, s)
    torch.testing.assert_close(eps, -s[:, None] * score, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(a[:, None] * x_0 + s[:, None] * eps, y.detach())
