"""What a step of an expert is made of: every image once an epoch, and conditions dropped together."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hddm.data.shards import Shard, load_shard
from hddm.training.loop import Order
from hddm.training.objectives import Objective, drawing
from hddm.utils.tensors import generator
from tests.artefacts import expert_settings, with_pixels

FLOW = Objective.named("flow")


@pytest.fixture
def shard(whole: Path) -> Shard:
    return load_shard(whole)


@pytest.mark.parametrize(("num", "batch"), [(7, 3), (8, 4), (5, 12), (1, 1)])
def test_every_sample_comes_once_an_epoch_in_an_order_of_its_own(num: int, batch: int) -> None:
    order = Order(num, batch, seed=3, key=(1,))
    stream = torch.cat([order.rows(step) for step in range(1, 4 * num + 1)])
    epochs = stream[: len(stream) // num * num].view(-1, num)
    assert (epochs.sort(1).values == torch.arange(num)).all()
    if num > 4:
        assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1


def test_a_step_does_not_depend_on_the_steps_before_it() -> None:
    whole, alone = (Order(10, 4, seed=0, key=(2,)) for _ in range(2))
    rows = [whole.rows(step) for step in range(1, 30)]
    assert torch.equal(alone.rows(17), rows[16])
    first, again = (torch.randn(3, generator=alone.draws(17)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.randn(3, generator=alone.draws(18)))
    other = Order(10, 4, seed=0, key=(3,))
    assert not torch.equal(torch.cat([other.rows(s) for s in range(1, 30)]), torch.cat(rows))


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_all_conditions_of_a_sample_are_dropped_at_once(shard: Shard, probability: float) -> None:
    settings = expert_settings("flow", condition_dropout=probability)
    given = {"class_labels": torch.arange(len(shard)) % 5, "size": torch.ones(len(shard), 2)}
    nulls = {"class_labels": torch.tensor(5), "size": torch.tensor([-1.0, -2.0])}
    draw = drawing(shard, FLOW, settings, given, nulls)
    rows = torch.arange(len(shard)).repeat(50)
    drawn = draw(rows, generator(0))
    gone = drawn["class_labels"] == 5
    spread = (probability * (1 - probability) / len(rows)) ** 0.5
    assert abs(gone.double().mean().item() - probability) <= 4 * spread
    assert torch.equal(drawn["class_labels"][~gone], given["class_labels"][rows][~gone])
    assert (drawn["size"] == torch.where(gone[:, None], nulls["size"], torch.ones(2))).all()


def test_half_the_images_are_mirrored_where_that_is_asked_for(shard: Shard) -> None:
    ramp = torch.arange(len(shard) * 16, dtype=torch.uint8).view(len(shard), 1, 4, 4)
    shard = with_pixels(shard, ramp)
    rows = torch.arange(len(shard)).repeat(40)

    def images(flip: bool) -> Tensor:
        settings = expert_settings("flow", random_flip=flip)
        return drawing(shard, FLOW, settings, {}, {})(rows, generator(1))["x_0"]

    plain = shard.take(rows)
    assert torch.equal(images(False), plain)
    mirrored = (images(True) == plain.flip(-1)).flatten(1).all(1)
    kept = (images(True) == plain).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert abs(mirrored.double().mean().item() - 0.5) < 4 * 0.5 / len(rows) ** 0.5


def test_times_on_the_common_path_are_told_with_the_native_ones(shard: Shard) -> None:
    objective = Objective.named("ddpm")
    drawn = drawing(shard, objective, expert_settings("ddpm"), {}, {})(torch.arange(8), generator(2))
    angle = drawn["time"] * torch.pi / 2
    torch.testing.assert_close(drawn["t"], angle.sin() / (angle.sin() + angle.cos()), rtol=1e-6, atol=1e-9)
