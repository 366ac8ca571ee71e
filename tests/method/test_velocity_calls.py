"""How an expert is asked: guidance, conditions, dtypes, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.cases import LINEAR, Case, case_named, each_legal
from tests.oracles import BoundedNetwork

SHAPE = (2, 4, 4)
T = torch.tensor([0.0, 0.2, 0.7, 1.0])


class Labelled:
    """A network of a class label and a scale a sample; it keeps the batch sizes of its calls."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(
        self, y: Tensor, timestep: Tensor, class_labels: Tensor, scale: Tensor | None = None
    ) -> Tensor:
        self.batches.append(len(y))
        shift = torch.sin(class_labels.to(y)).view(-1, 1, 1, 1)
        return torch.tanh(y * (1 if scale is None else scale.view(-1, 1, 1, 1)) + shift)


class Recorder(nn.Module):
    """A module of one parameter, so that it has a dtype; it keeps what it was fed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones((), dtype=dtype))
        self.fed: list[tuple[Tensor, Tensor]] = []

    def forward(self, y: Tensor, timestep: Tensor) -> Tensor:
        self.fed.append((y, timestep))
        return self.gain * y


def _states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(len(T), *SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


LABELS, NULL = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 0, 0, 0])


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 7.5])
def test_guidance_is_its_formula_in_one_batch(scale: float) -> None:
    network = Labelled()
    field = VelocityField(network, case_named("cosine").schedule, "v_prediction")
    x_t = _states(torch.float64)
    positive = field.velocity(x_t, T, class_labels=LABELS)
    negative = field.velocity(x_t, T, class_labels=NULL)
    network.batches.clear()
    guided = field.velocity(x_t, T, scale, {"class_labels": NULL}, class_labels=LABELS)
    assert network.batches == [2 * len(T)]
    torch.testing.assert_close(guided, negative + scale * (positive - negative))


class Told:
    """A network of a text of any length; it keeps the batch sizes of its calls."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(
        self, y: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor
    ) -> Tensor:
        self.batches.append(len(y))
        heard = (encoder_hidden_states * encoder_attention_mask[:, :, None]).sum((1, 2))
        return heard.to(y).view(-1, 1, 1, 1) * y


@pytest.mark.parametrize("length", [3, 5], ids=["a shorter one", "null values"])
def test_texts_of_different_lengths_guide_as_those_of_one_do(length: int) -> None:
    noise = torch.Generator().manual_seed(1)
    tokens, others = torch.randn(4, 7, 2, generator=noise), torch.randn(length, 2, generator=noise)
    masks = (torch.tensor([[1, 1, 1, 1, 0, 0, 0]]).repeat(4, 1), torch.ones(length))
    nulls = {"encoder_hidden_states": others, "encoder_attention_mask": masks[1]} if length == 5 else {}
    network = Told()
    field = VelocityField(network, LINEAR.schedule, "flow_prediction", null_conditions=nulls)
    negative = {
        "encoder_hidden_states": others.expand(4, -1, -1),
        "encoder_attention_mask": masks[1].expand(4, -1),
    }
    x_t = _states()
    found = field.velocity(
        x_t,
        T,
        3.0,
        None if nulls else negative,
        encoder_hidden_states=tokens,
        encoder_attention_mask=masks[0],
    )
    positive = tokens[:, :4].sum((1, 2))
    gain = others.sum() + 3.0 * (positive - others.sum())
    torch.testing.assert_close(found, gain.view(-1, 1, 1, 1) * x_t)
    assert network.batches == [4, 4]


class Sized:
    """A network of a text and a size, each a number a sample."""

    def __call__(self, y: Tensor, timestep: Tensor, text_embeds: Tensor, time_ids: Tensor) -> Tensor:
        return (text_embeds * time_ids).view(-1, 1, 1, 1).to(y) * y


def _sized(**nulls: float) -> VelocityField:
    values = {name: torch.tensor(value) for name, value in nulls.items()}
    return VelocityField(Sized(), LINEAR.schedule, "flow_prediction", null_conditions=values)


@pytest.mark.parametrize(
    ("nulls", "negative_sizes", "sizes_used"),
    [({}, None, [4.0, 5.0, 6.0, 7.0]), ({}, [9.0] * 4, [9.0] * 4), ({"time_ids": 8.0}, None, [8.0] * 4)],
    ids=["no null value", "given", "a null value"],
)
def test_the_negative_branch_has_the_settings_of_the_other_one(
    nulls: dict[str, float], negative_sizes: list[float] | None, sizes_used: list[float]
) -> None:
    texts, sizes, against = torch.arange(4.0), torch.tensor([4.0, 5.0, 6.0, 7.0]), torch.full((4,), -2.0)
    negative = {"text_embeds": against}
    if negative_sizes is not None:
        negative["time_ids"] = torch.tensor(negative_sizes)
    found = _sized(**nulls).velocity(_states(), T, 3.0, negative, text_embeds=texts, time_ids=sizes)
    unguided = against * torch.tensor(sizes_used)
    gain = unguided + 3.0 * (texts * sizes - unguided)
    torch.testing.assert_close(found, gain.view(-1, 1, 1, 1) * _states())


def test_settings_alone_guide_nowhere() -> None:
    field = _sized(text_embeds=1.0)
    with pytest.raises(HddmError, match="guidance needs a condition to guide to"):
        field.velocity(_states(), T, 3.0, time_ids=T)
    found = field.velocity(_states(), T, 3.0, {"time_ids": T + 1}, time_ids=T)
    torch.testing.assert_close(found, (T + 1 - 3).view(-1, 1, 1, 1) * _states())


@pytest.mark.parametrize(
    ("positive", "negative", "words"),
    [
        (("text_embeds", "mask"), ("text_embeds",), "the negative conditions lack mask, and this"),
        (("text_embeds",), ("text_embeds", "mask"), "both sides: the conditions lack mask, and this"),
        (("mask", "text_embeds"), (), "the negative conditions lack mask and text_embeds, and"),
        (("mask",), ("text_embeds",), "negative conditions lack mask, the conditions lack text_embeds, and"),
    ],
    ids=["negative", "positive", "several", "both"],
)
def test_what_one_side_of_guidance_lacks_is_named(
    positive: tuple[str, ...], negative: tuple[str, ...], words: str
) -> None:
    with pytest.raises(HddmError, match=words):
        _sized().velocity(_states(), T, 3.0, dict.fromkeys(negative, T), **dict.fromkeys(positive, T))


def test_guidance_falls_back_on_the_null_condition() -> None:
    field = VelocityField(
        Labelled(),
        LINEAR.schedule,
        "flow_prediction",
        conditions=("class_labels",),
        null_conditions={"class_labels": torch.tensor(0)},
    )
    given = field.velocity(_states(), T, 4.0, {"class_labels": NULL}, class_labels=LABELS)
    assert torch.equal(field.velocity(_states(), T, 4.0, class_labels=LABELS), given)


@pytest.mark.parametrize(
    ("conditions", "negative"),
    [
        ({}, None),
        ({}, {"class_labels": NULL}),
        ({"class_labels": LABELS}, None),
        ({"class_labels": LABELS}, {"scale": T}),
        ({"class_labels": LABELS}, {"class_labels": NULL, "scale": T}),
    ],
    ids=["nothing", "no condition", "no negative", "another one", "one too many"],
)
def test_guidance_without_a_condition_and_its_negative_is_refused(
    conditions: dict[str, Tensor], negative: dict[str, Tensor] | None
) -> None:
    field = VelocityField(Labelled(), LINEAR.schedule, "flow_prediction")
    with pytest.raises(HddmError, match="guidance needs"):
        field.velocity(_states(), T, 2.0, negative, **conditions)


@pytest.mark.parametrize(
    ("declared", "given", "scale", "negative", "problem"),
    [
        ("class_labels", {"caption": LABELS}, 1.0, None, r"'caption'.*declares: class_labels"),
        ("class_labels", {"class_labels": LABELS}, 2.0, {"caption": NULL}, "'caption'"),
        # Where nothing guides too.
        ("class_labels", {"class_labels": LABELS}, 1.0, {"bogus": NULL}, r"'bogus'.*declares: class_labels"),
        ("class_labels", {"class_labels": LABELS}, 1.0, {"class_labels": NULL[:2]}, "has shape"),
        ("", {"class_labels": LABELS}, 1.0, None, "declares: none"),
        ("class_labels", {}, 1.0, None, "needs class_labels"),
    ],
    ids=["given", "negative", "unguided", "too few", "none declared", "one missing"],
)
def test_other_conditions_than_the_declared_are_refused(
    declared: str, given: dict[str, Tensor], scale: float, negative: dict[str, Tensor] | None, problem: str
) -> None:
    field = VelocityField(Labelled(), LINEAR.schedule, "flow_prediction", conditions=declared.split())
    with pytest.raises(HddmError, match=problem):
        field.velocity(_states(), T, scale, negative, **given)


@each_legal
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_velocity_has_the_dtype_and_shape_of_the_state(
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


def test_times_reach_the_network_in_float64_for_a_float64_state() -> None:
    network = Recorder(torch.float32)
    t = torch.tensor([1 / 3], dtype=torch.float64)
    field = VelocityField(network, LINEAR.schedule, "flow_prediction", 1000.0)
    field.velocity(_states(torch.float64)[:1], t)
    ((y, timestep),) = network.fed
    assert y.dtype == torch.float32
    assert timestep.dtype == torch.float64
    assert timestep.item() == 1000 / 3


def test_half_precision_states_are_matched_and_converted_in_float32() -> None:
    network = Recorder(torch.float32)
    field = VelocityField(network, case_named("ddpm-linear").schedule, "epsilon")
    v = field.velocity(_states(torch.bfloat16), T)
    assert network.fed[0][0].dtype == network.fed[0][1].dtype == torch.float32
    expected = field.velocity(_states(torch.bfloat16).float(), T).to(torch.bfloat16)
    assert torch.equal(v, expected)


def test_a_scalar_time_stands_for_the_whole_batch() -> None:
    field = VelocityField(BoundedNetwork(), case_named("cosine").schedule, "epsilon")
    one = field.velocity(_states(), torch.tensor(0.4))
    assert torch.equal(one, field.velocity(_states(), torch.full((len(T),), 0.4)))


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


def test_a_network_with_another_number_of_channels_is_refused() -> None:
    field = VelocityField(lambda y, u: torch.cat([y, y], 1), LINEAR.schedule, "epsilon")
    with pytest.raises(HddmError, match=r"returned \(4, 4, 4, 4\)"):
        field.velocity(_states(), T)


@pytest.mark.parametrize(
    "labels", [torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0])], ids=str
)
def test_labels_that_are_no_classes_are_refused(labels: Tensor) -> None:
    null = {"class_labels": torch.tensor(2)}
    field = VelocityField(
        Labelled(), LINEAR.schedule, "flow_prediction", null_conditions=null, classes=("cat", "dog")
    )
    with pytest.raises(HddmError, match="whole numbers from 0 to 2"):
        field.velocity(_states()[:2], T[:2], class_labels=labels)
    assert field.velocity(_states()[:2], T[:2], class_labels=torch.tensor([0, 2])).isfinite().all()
