"""The loop: its learning rate, its average of the weights, and that the average is float32."""

import math

import pytest
import torch
from torch import Tensor, nn

from hddm.errors import HddmError
from hddm.facts import parse_facts
from hddm.training.ema import Ema
from hddm.training.loop import LoopSettings, fit


class _Point(nn.Module):
    """One parameter vector."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([3.0, -2.0]))


def _average(values: list[Tensor], decay: float) -> Tensor:
    """The average of ``values[1:]`` from ``values[0]`` on, by its definition."""
    average = values[0].double()
    for n, value in enumerate(values[1:]):
        d = min(decay, (1 + n) / (10 + n))
        average = d * average + (1 - d) * value.double()
    return average


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_the_average_follows_its_formula(decay: float) -> None:
    point, noise = _Point(), torch.Generator().manual_seed(0)
    ema, values = Ema(point, decay), [point.place.detach().clone()]
    for _ in range(20):
        point.place.data = torch.randn(2, generator=noise)
        values.append(point.place.detach().clone())
        ema.update()
    ema.copy_to_network()
    torch.testing.assert_close(point.place.double(), _average(values, decay), rtol=1e-6, atol=1e-6)


def test_the_average_moves_in_float32_where_bfloat16_would_stand_still() -> None:
    point = _Point().bfloat16()
    ema = Ema(point, decay=0.999)
    start = point.place.detach().clone()
    ema.updates = 100_000
    point.place.data = start + torch.tensor([0.5, 0.5]).bfloat16()
    for _ in range(3):
        ema.update()
    (shadow,) = ema._shadow
    assert shadow.dtype == torch.float32
    torch.testing.assert_close(
        shadow - start.float(), torch.full((2,), 0.5 * (1 - 0.999**3)), rtol=1e-3, atol=0
    )
    assert torch.equal(shadow.bfloat16(), start)


def test_training_leaves_the_averaged_weights() -> None:
    point = _Point()
    values = [point.place.detach().clone()]
    settings = LoopSettings(steps=30, learning_rate=0.1, warmup=3, ema_decay=0.6)
    fitted = fit(
        point,
        lambda: point.place.square().sum(),
        settings,
        lambda step, loss: values.append(point.place.detach().clone()),
    )
    torch.testing.assert_close(point.place.double(), _average(values, 0.6), rtol=1e-5, atol=1e-6)
    assert not torch.equal(point.place, values[-1])
    expected = [value.square().sum().item() for value in values[:-1]]
    assert fitted.losses == pytest.approx(expected, rel=1e-6)
    assert fitted.losses[-1] < fitted.losses[0]


@pytest.mark.parametrize(("steps", "warmup"), [(12, 4), (5, 0), (6, 20)])
def test_the_rate_warms_up_linearly_and_decays_as_a_cosine(steps: int, warmup: int) -> None:
    """Adam moves by exactly its rate where the gradient never changes."""
    point = _Point()
    places = [point.place.detach().clone()]
    settings = LoopSettings(steps=steps, learning_rate=0.01, warmup=warmup, weight_decay=0, max_grad_norm=100)
    fit(point, lambda: point.place.sum(), settings, lambda *_: places.append(point.place.detach().clone()))
    moved = -torch.stack(places).diff(dim=0)[:, 0]
    rates = [
        0.01 * min(1, (n + 1) / max(warmup, 1)) * (1 + math.cos(math.pi * n / steps)) / 2
        for n in range(steps)
    ]
    torch.testing.assert_close(moved, torch.tensor(rates), rtol=1e-3, atol=1e-6)


def test_the_gradient_is_clipped() -> None:
    """With weight decay off, one step of Adam after a clip remembers the clipped gradient only."""
    seen = []
    point = _Point()

    def loss() -> Tensor:
        if point.place.grad is not None:
            seen.append(point.place.grad.norm().item())
        return 1000 * point.place.square().sum()

    fit(point, loss, LoopSettings(steps=3, max_grad_norm=0.25))
    assert seen == pytest.approx([0.25, 0.25], rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_step_that_is_not_finite_is_named(bad: float) -> None:
    point, calls = _Point(), iter(range(1, 10))
    steps: list[int] = []

    def loss() -> Tensor:
        return point.place.sum() * (bad if next(calls) == 3 else 1)

    with pytest.raises(HddmError, match=r"^step 3: loss (nan|inf|-inf)"):
        fit(point, loss, LoopSettings(steps=5), lambda step, _: steps.append(step))
    assert steps == [1, 2]
    assert point.place.isfinite().all()


def test_a_gradient_that_is_not_finite_stops_too() -> None:
    point = _Point()

    def loss() -> Tensor:
        return (point.place - point.place.detach()).abs().sum().sqrt()

    with pytest.raises(HddmError, match=r"step 1: loss 0.0, gradient norm (nan|inf)"):
        fit(point, loss, LoopSettings(steps=5))


@pytest.mark.parametrize(
    "setting",
    [{"steps": 0}, {"learning_rate": 0}, {"ema_decay": 1.0}, {"batch_size": 0}, {"warmup": -1}],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(setting: dict[str, float]) -> None:
    (name,) = setting
    with pytest.raises(HddmError, match=f"options: key '{name}'"):
        parse_facts({"steps": 1, **setting}, LoopSettings, "options")


def test_a_record_holds_the_settings_and_the_loss_of_the_last_twentieth() -> None:
    point, values = _Point(), iter(range(100))
    settings = LoopSettings(steps=100, batch_size=3, seed=5)
    fitted = fit(point, lambda: point.place.sum() * 0 + float(next(values)), settings)
    record = fitted.record(settings)
    assert record["final_loss"] == sum(range(95, 100)) / 5
    assert record["images_seen"] == 300
    assert record["seed"] == 5
    assert record["seconds"] >= 0
