"""Classifier-free guidance: its formula, where it acts, and what others publish with it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import hddm
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import Conversion, plan
from hddm.sampling import sample
from hddm.schedules import LinearSchedule
from hddm.utils.errors import HddmError
from hddm.velocity import Guidance, VelocityField
from tests.checkpoint_files import DDPM_BETAS, dit, pipeline

SHAPE = (4, 3, 3)
EVERYWHERE = torch.ones(5, dtype=torch.bool)


def _velocities() -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    return tuple(torch.randn(5, *SHAPE, generator=noise, dtype=torch.float64) for _ in range(2))


def test_channels_that_are_not_guided_are_the_conditional_ones() -> None:
    v_c, v_n = _velocities()
    found = Guidance(3.0, channels=3).combine(v_c, v_n, EVERYWHERE)
    torch.testing.assert_close(found[:, :3], (3 * v_c - 2 * v_n)[:, :3])
    assert torch.equal(found[:, 3], v_c[:, 3])


def test_rows_outside_the_interval_are_the_conditional_ones() -> None:
    v_c, v_n = _velocities()
    guidance = Guidance(3.0, interval=(0.25, 0.75))
    acts = guidance.acts(torch.tensor([0.0, 0.25, 0.5, 0.75, 0.76], dtype=torch.float64))
    assert acts.tolist() == [False, True, True, True, False]
    found = guidance.combine(v_c, v_n, acts)
    assert torch.equal(found[[0, 4]], v_c[[0, 4]])
    torch.testing.assert_close(found[1:4], (3 * v_c - 2 * v_n)[1:4])


@pytest.mark.parametrize("channels", [None, 3])
@pytest.mark.parametrize("rescale", [0.7, 1.0])
def test_rescaling_is_that_of_its_paper_over_what_is_guided(rescale: float, channels: int | None) -> None:
    v_c, v_n = _velocities()
    found = Guidance(5.0, channels, rescale=rescale).combine(v_c, v_n, EVERYWHERE).numpy()
    count = channels or SHAPE[0]
    for row, positive, negative in zip(found, v_c.numpy(), v_n.numpy(), strict=True):
        # Equations 14 to 16 of arXiv:2305.08891, in their words.
        pos, neg = positive[:count], negative[:count]
        cfg = neg + 5.0 * (pos - neg)
        rescaled = cfg * (np.std(pos, ddof=1) / np.std(cfg, ddof=1))
        np.testing.assert_allclose(row[:count], rescale * rescaled + (1 - rescale) * cfg, rtol=1e-12)
        np.testing.assert_array_equal(row[count:], positive[count:])


class Counting:
    """A network that gives its label, and keeps how many rows each call had, and their labels."""

    def __init__(self) -> None:
        self.labels: list[list[int]] = []

    def __call__(self, y: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        self.labels.append(class_labels.tolist())
        return -class_labels.to(y).view(-1, 1, 1, 1).expand_as(y)

    def field(self) -> VelocityField:
        nulls = {"class_labels": torch.tensor(9)}
        return VelocityField(
            self, LinearSchedule(), "flow_prediction", null_conditions=nulls, sample_shape=SHAPE
        )


def test_outside_its_interval_guidance_costs_nothing() -> None:
    network, labels = Counting(), torch.tensor([1, 2])
    guidance = Guidance(2.0, interval=(0.3, 0.6))
    found = sample(network.field(), 2, steps=10, guidance_scale=guidance, class_labels=labels)
    # Euler asks at 1, 0.9, … 0.1: guided at 0.6, 0.5, 0.4 and 0.3, the ends of the interval included.
    once, twice = [1, 2], [1, 2, 9, 9]
    assert network.labels == [once] * 4 + [twice] * 4 + [once] * 2
    noise = sample(Counting().field(), 2, steps=10, class_labels=torch.zeros(2))
    drift = 0.6 * labels + 0.4 * (2 * labels - 9)
    torch.testing.assert_close(found, noise + drift.view(-1, 1, 1, 1))


@pytest.mark.parametrize("guidance", [1.0, Guidance(1.0), Guidance(1.0, rescale=0.5)], ids=str)
def test_a_scale_of_one_asks_for_no_negative_branch(guidance: float | Guidance) -> None:
    network = Counting()
    network.field().velocity(
        torch.zeros(2, *SHAPE), torch.tensor([0.1, 0.9]), guidance, class_labels=torch.tensor([1, 2])
    )
    assert network.labels == [[1, 2]]


def test_a_batch_of_several_times_is_guided_a_row_at_a_time() -> None:
    network, times = Counting(), torch.tensor([0.1, 0.5, 0.9])
    guidance = Guidance(2.0, interval=(0.4, 0.6))
    v = network.field().velocity(
        torch.zeros(3, *SHAPE), times, guidance, class_labels=torch.tensor([1, 2, 3])
    )
    assert v[:, 0, 0, 0].tolist() == [-1, -(2 * 2 - 9), -3]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"scale": math.nan}, "scale must be finite, not nan"),
        ({"scale": math.inf}, "scale must be finite, not inf"),
        ({"channels": 0}, "channels start at 1, not 0"),
        ({"interval": (0.6, 0.4)}, "not 0.6 to 0.4"),
        ({"interval": (-0.1, 0.4)}, "not -0.1 to 0.4"),
        ({"interval": (0.5, math.nan)}, "not 0.5 to nan"),
        ({"rescale": 1.1}, "rescale lies in"),
        ({"rescale": math.nan}, "rescale lies in"),
    ],
    ids=str,
)
def test_numbers_outside_their_ranges_are_refused(values: dict[str, float], words: str) -> None:
    with pytest.raises(HddmError, match=words):
        Guidance(**{"scale": 2.0, **values})


def test_more_guided_channels_than_there_are_are_refused() -> None:
    v_c, v_n = _velocities()
    with pytest.raises(HddmError, match="5 guided channels asked for, and samples have 4"):
        Guidance(2.0, channels=5).combine(v_c, v_n, EVERYWHERE)


@torch.no_grad()
def test_three_guided_channels_are_what_dit_published(tmp_path: Path) -> None:
    network = dit(0)
    pipeline(tmp_path / "source", network)
    config = {"_class_name": "DDPMScheduler", "beta_schedule": "linear"}
    (tmp_path / "source" / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    write(plan(tmp_path / "source", Conversion()), tmp_path / "expert")
    field = hddm.load(tmp_path / "expert", torch.float64)
    network.double()

    def forward_with_cfg(y: Tensor, timestep: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Written after the description of DiT's sampler: 8 output channels, the first 3 guided."""
        both = torch.cat([y, y])
        given = torch.cat([labels, torch.full_like(labels, 5)])
        output = network(both, timestep.repeat(2), class_labels=given, return_dict=False)[0]
        cond, uncond = output[:, :3].chunk(2)
        return torch.cat([uncond + scale * (cond - uncond), output[: len(y), 3:4]], dim=1)

    noise = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, 8, 8, generator=noise, dtype=torch.float64)
    labels = torch.tensor([0, 3, 4])
    kept = (1 - DDPM_BETAS.double()).cumprod(0)
    for index in (50, 400, 800):
        # At a whole timestep the match is exact: s/a = t/(1 - t).
        a, s = kept[index].sqrt(), (1 - kept[index]).sqrt()
        t = s / (a + s)
        eps = forward_with_cfg((a + s) * x, torch.full((3,), float(index)).double(), labels, 4.0)
        found = field.velocity(x, t.expand(3), Guidance(4.0, channels=3), class_labels=labels)
        # DDPM_BETAS are float32 sums of a float64 grid.
        torch.testing.assert_close(found, (eps - x) / (1 - t), rtol=1e-5, atol=1e-5)
        everywhere = field.velocity(x, t.expand(3), 4.0, class_labels=labels)
        torch.testing.assert_close(found[:, :3], everywhere[:, :3])
        assert (found[:, 3] - everywhere[:, 3]).abs().max() > 1e-2
