"""How an expert is asked: conditions, dtypes, times, and what is refused."""

import pytest
import torch
from torch import Tensor

from hddm.networks.wrappers import declared_shape
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.cases import LINEAR, Case, ConditionSum, case_named, each_legal
from tests.checkpoint_files import plain_unet
from tests.oracles import BoundedNetwork, Recorder

SHAPE = (2, 4, 4)
T = torch.tensor([0.0, 0.2, 0.7, 1.0])


def _states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(len(T), *SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


LABELS, NULL = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 0, 0, 0])


@pytest.mark.parametrize(
    ("declared", "given", "scale", "negative", "problem"),
    [
        ("class_labels", {"caption": LABELS}, 1.0, None, r"'caption'.*declares: class_labels"),
        ("class_labels", {"class_labels": LABELS}, 2.0, {"caption": NULL}, "'caption'"),
        # Where nothing guides too.
        ("class_labels", {"class_labels": LABELS}, 1.0, {"bogus": NULL}, r"'bogus'.*declares: class_labels"),
        ("class_labels", {"class_labels": LABELS[:3]}, 1.0, None, r"class_labels.*4 samples"),
        ("", {"class_labels": LABELS}, 1.0, None, "declares: none"),
        ("class_labels", {}, 1.0, None, "needs class_labels"),
    ],
    ids=["given", "negative", "unguided", "few", "none declared", "one missing"],
)
def test_other_conditions_than_the_declared_are_refused(
    declared: str, given: dict[str, Tensor], scale: float, negative: dict[str, Tensor] | None, problem: str
) -> None:
    with pytest.raises(HddmError, match=problem):
        ConditionSum().field(*declared.split()).velocity(_states(), T, scale, negative, **given)


@each_legal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_velocity_has_the_state_s_dtype_and_shape(
    case: Case, prediction_type: str, dtype: torch.dtype
) -> None:
    field = VelocityField(BoundedNetwork(), case.schedule, prediction_type)
    v = field.velocity(_states(dtype), T)
    assert v.dtype == dtype
    assert v.shape == (len(T), *SHAPE)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["ddpm-linear", "cosine", "linear"])
def test_times_reach_the_network_in_float32_with_their_fractions(name: str, weights: torch.dtype) -> None:
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
            assert torch.equal(VelocityField(form, LINEAR.schedule, "epsilon").velocity(states, T), v)
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
