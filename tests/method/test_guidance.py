"""Classifier-free guidance: its formula, where it acts, and what others publish with it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

import hddm
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import plan_conversion
from hddm.conditions import Conditions
from hddm.ensemble import Ensemble
from hddm.guidance import Guidance
from hddm.noise import Seeded
from hddm.sampling import integrate, sample, time_grid
from hddm.settings import Conversion, SampleSettings
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField
from tests.artefacts import refusal
from tests.cases import LINEAR, ConditionSum
from tests.checkpoint_files import DDPM_BETAS, dit, pipeline

SHAPE = (4, 3, 3)
EVERYWHERE = torch.ones(5, dtype=torch.bool)


def _velocities() -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)
    return tuple(torch.randn(5, *SHAPE, generator=noise, dtype=torch.float64) for _ in range(2))


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
def test_rescaling_is_that_of_its_paper_over_what_is_guided(
    rescale: float, channels: int | None
) -> None:
    v_c, v_n = _velocities()
    found = Guidance(5.0, channels, rescale=rescale).combine(v_c, v_n, EVERYWHERE).numpy()
    count = channels or SHAPE[0]
    for row, positive, negative in zip(found, v_c.numpy(), v_n.numpy(), strict=True):
        # Equations 14 to 16 of arXiv:2305.08891, in their words.
        pos, neg = positive[:count], negative[:count]
        cfg = neg + 5.0 * (pos - neg)
        rescaled = cfg * (np.std(pos, ddof=1) / np.std(cfg, ddof=1))
        np.testing.assert_allclose(
            row[:count], rescale * rescaled + (1 - rescale) * cfg, rtol=1e-12
        )
        np.testing.assert_array_equal(row[count:], positive[count:])


@pytest.mark.parametrize("channels", [None, 3])
def test_a_norm_by_rows_is_that_of_the_pipeline_of_lumina_2_over_what_is_guided(
    channels: int | None,
) -> None:
    v_c, v_n = _velocities()
    found = Guidance(5.0, channels, norm="rows").combine(v_c, v_n, EVERYWHERE).numpy()
    count = channels or SHAPE[0]
    for row, positive, negative in zip(found, v_c.numpy(), v_n.numpy(), strict=True):
        for place in range(SHAPE[0]):
            if place >= count:
                np.testing.assert_array_equal(row[place], positive[place])
                continue
            for line, pos, neg in zip(row[place], positive[place], negative[place], strict=True):
                cfg = neg + 5.0 * (pos - neg)
                kept = cfg * (np.linalg.norm(pos) / np.linalg.norm(cfg))
                np.testing.assert_allclose(line, kept, rtol=1e-12)


def test_a_norm_and_rescaling_together_are_refused() -> None:
    with pytest.raises(ValidationError, match="no effect with `guidance_norm`"):
        Guidance(5.0, rescale=0.5, norm="rows")
    with pytest.raises(ValidationError, match="no effect with `guidance_norm`"):
        SampleSettings(guidance_scale=5.0, guidance_rescale=0.5, guidance_norm="rows")


def _field(network: ConditionSum) -> VelocityField:
    nulls = {"class_labels": torch.tensor(9)}
    return network.field("class_labels", null_conditions=nulls, sample_shape=SHAPE)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 7.5])
def test_guidance_is_its_formula_in_one_batch_against_the_null_condition_by_default(
    scale: float,
) -> None:
    x_t, t, labels, null = (
        torch.zeros(2, *SHAPE),
        torch.tensor([0.0, 0.7]),
        torch.tensor([1.0, 2.0]),
        9,
    )
    for negative, against in ((None, null), ({"class_labels": torch.tensor([4.0, 4.0])}, 4)):
        network = ConditionSum()
        found = _field(network).velocity(x_t, t, scale, negative, class_labels=labels)
        assert [len(y) for y in network.states] == [4]
        assert found[:, 0, 0, 0].tolist() == (against + scale * (labels - against)).tolist()


def test_outside_its_interval_guidance_costs_nothing() -> None:
    network, labels = ConditionSum(), torch.tensor([1, 2])
    guidance = Guidance(2.0, interval=(0.3, 0.6))
    how = {"steps": 10, "solver": "euler", "guidance_scale": guidance}
    found = sample(_field(network), 2, **how, class_labels=labels)
    # Euler asks at 1, 0.9, … 0.1: guided at 0.6, 0.5, 0.4 and 0.3, the ends of the interval included.
    asked = [given["class_labels"] for given in network.conditions]
    assert asked == [[1, 2]] * 4 + [[1, 2, 9, 9]] * 4 + [[1, 2]] * 2
    drift = 0.6 * labels + 0.4 * (2 * labels - 9)
    torch.testing.assert_close(found, Seeded(0).initial(range(2), SHAPE) - drift.view(-1, 1, 1, 1))


@pytest.mark.parametrize("guidance", [1.0, Guidance(1.0), Guidance(1.0, rescale=0.5)], ids=str)
def test_a_scale_of_one_asks_for_no_negative_branch(guidance: float | Guidance) -> None:
    network, labels = ConditionSum(), torch.tensor([1, 2])
    _field(network).velocity(
        torch.zeros(2, *SHAPE), torch.tensor([0.1, 0.9]), guidance, class_labels=labels
    )
    assert network.conditions == [{"class_labels": [1, 2]}]


@pytest.mark.parametrize(
    ("guidance", "words"),
    [
        (1.0, "no effect at `guidance_scale` 1; set a scale, or drop it"),
        (
            Guidance(2.0, by="weak"),
            "no effect with `guide_by` weak; guide by condition, or drop it",
        ),
    ],
    ids=str,
)
def test_a_negative_condition_that_nothing_moves_away_from_is_refused(
    guidance: float | Guidance, words: str
) -> None:
    field = _field(ConditionSum())
    field.weak = _field(ConditionSum())
    labels = {"class_labels": torch.tensor([1, 2])}
    given = (torch.zeros(2, *SHAPE), torch.tensor([0.1, 0.9]), guidance, labels)
    for model in (field, Ensemble([field], strategy="full")):
        told = refusal(model.velocity, *given, **labels)
        assert told == f"`negative_prompt`, or negative conditions: {words}"
    conditions = Conditions(labels, labels)
    told = refusal(integrate, field, given[0], time_grid(2), conditions, guidance=guidance)
    assert told == f"`negative_prompt`, or negative conditions: {words}"


X, T = torch.ones(4, *SHAPE), torch.tensor([0.0, 0.2, 0.7, 1.0])


@pytest.mark.parametrize("length", [3, 5], ids=["a shorter one", "null values"])
def test_texts_of_different_lengths_guide_as_those_of_one_do(length: int) -> None:
    batches: list[int] = []

    def network(
        y: Tensor, timestep: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor
    ) -> Tensor:
        batches.append(len(y))
        heard = (encoder_hidden_states * encoder_attention_mask[:, :, None]).sum((1, 2))
        return heard.view(-1, 1, 1, 1) * y

    noise = torch.Generator().manual_seed(1)
    tokens, others = torch.randn(4, 7, 2, generator=noise), torch.randn(length, 2, generator=noise)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0]]).repeat(4, 1)
    against = {"encoder_hidden_states": others, "encoder_attention_mask": torch.ones(length)}
    negative = {name: value.expand(4, *value.shape) for name, value in against.items()}
    nulls, negative = (against, None) if length == 5 else ({}, negative)
    field = VelocityField(network, LINEAR.schedule, "flow_prediction", null_conditions=nulls)
    given = {"encoder_hidden_states": tokens, "encoder_attention_mask": mask}
    found = field.velocity(X, T, 3.0, negative, **given)
    gain = others.sum() + 3.0 * (tokens[:, :4].sum((1, 2)) - others.sum())
    torch.testing.assert_close(found, gain.view(-1, 1, 1, 1) * X)
    assert batches == [4, 4]


def _sized(**nulls: float) -> VelocityField:
    """An expert of a text and a size."""
    values = {name: torch.tensor(value) for name, value in nulls.items()}
    return VelocityField(ConditionSum(), LINEAR.schedule, "flow_prediction", null_conditions=values)


@pytest.mark.parametrize(
    ("nulls", "negative_sizes", "sizes_used"),
    [
        ({}, None, [4.0, 5.0, 6.0, 7.0]),
        ({}, [9.0] * 4, [9.0] * 4),
        ({"time_ids": 8.0}, None, [8.0] * 4),
    ],
    ids=["no null value", "given", "a null value"],
)
def test_the_negative_branch_has_the_settings_of_the_other_one(
    nulls: dict[str, float], negative_sizes: list[float] | None, sizes_used: list[float]
) -> None:
    texts, sizes, against = (
        torch.arange(4.0),
        torch.tensor([4.0, 5.0, 6.0, 7.0]),
        torch.full((4,), -2.0),
    )
    negative = {"text_embeds": against}
    if negative_sizes is not None:
        negative["time_ids"] = torch.tensor(negative_sizes)
    found = _sized(**nulls).velocity(X, T, 3.0, negative, text_embeds=texts, time_ids=sizes)
    unguided = against + torch.tensor(sizes_used)
    assert found[:, 0, 0, 0].tolist() == (unguided + 3.0 * (texts + sizes - unguided)).tolist()


@pytest.mark.parametrize(
    ("positive", "negative", "words"),
    [
        (
            ("mask",),
            ("text_embeds",),
            "negative conditions lack mask, the conditions lack text_embeds, and",
        ),
        ((), ("text_embeds",), "guidance needs a condition to guide to"),
    ],
    ids=str,
)
def test_what_one_side_lacks_is_named(
    positive: tuple[str, ...], negative: tuple[str, ...], words: str
) -> None:
    with pytest.raises(HddmError, match=words):
        _sized().velocity(X, T, 3.0, dict.fromkeys(negative, T), **dict.fromkeys(positive, T))


@pytest.mark.parametrize(
    "values",
    [
        {"scale": math.nan},
        {"channels": 0},
        {"interval": (0.6, 0.4)},
        {"interval": (0.5, math.nan)},
        {"rescale": math.nan},
        {"by": "wek"},
        {"norm": "columns"},
    ],
    ids=str,
)
def test_values_outside_their_ranges_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Guidance(**{"scale": 2.0, **values})


@torch.no_grad()
def test_three_guided_channels_are_what_dit_published(tmp_path: Path) -> None:
    network = dit(0)
    pipeline(tmp_path / "source", network)
    config = {"_class_name": "DDPMScheduler", "beta_schedule": "linear"}
    (tmp_path / "source" / "scheduler" / "scheduler_config.json").write_text(json.dumps(config))
    write(plan_conversion(tmp_path / "source", Conversion()), tmp_path / "expert")
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


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_guidance_by_the_weak_model_is_its_formula_under_the_same_conditions(scale: float) -> None:
    weak, network = ConditionSum(2.0), ConditionSum(5.0)
    expert = network.field("class_labels", sample_shape=SHAPE)
    expert.weak = weak.field("class_labels")
    x_t, labels = torch.zeros(3, *SHAPE), torch.tensor([1.0, 2.0, 3.0])
    t, guidance = torch.tensor([0.1, 0.5, 0.9]), Guidance(scale, interval=(0.0, 0.5), by="weak")
    found = expert.velocity(x_t, t, guidance, class_labels=labels)[:, 0, 0, 0]
    assert found.tolist() == [1 + 2 + 3 * scale, 2 + 2 + 3 * scale, 3 + 5]
    assert weak.conditions == network.conditions == [{"class_labels": [1, 2, 3]}]


def test_each_expert_of_an_ensemble_is_guided_by_its_own_weak_model_without_any_condition() -> None:
    experts = [ConditionSum(v).field(sample_shape=SHAPE) for v in (1.0, 10.0)]
    for expert, value in zip(experts, (0.5, 8.0), strict=True):
        expert.weak = ConditionSum(value).field()
    ensemble = hddm.Ensemble(
        experts, lambda x, t: x.new_tensor([[0.25, 0.75]]).expand(len(x), -1), "full"
    )
    found = ensemble.velocity(torch.zeros(2, *SHAPE), torch.tensor(0.5), Guidance(3.0, by="weak"))
    assert found.unique().tolist() == [0.25 * (0.5 + 3 * 0.5) + 0.75 * (8 + 3 * 2)]
    experts[1].weak = None
    with pytest.raises(HddmError, match="has no weak model"):
        experts[1].velocity(torch.zeros(2, *SHAPE), torch.tensor(0.5), Guidance(3.0, by="weak"))
    calls = len(experts[0].network.conditions)
    with pytest.raises(HddmError, match="expert 1: has no weak model"):
        hddm.sample(ensemble, 2, guidance_scale=Guidance(3.0, by="weak"))
    assert len(experts[0].network.conditions) == calls
