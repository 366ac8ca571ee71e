"""Training an expert on: what it learns, what it keeps, and what it remembers."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from diffusers import DiTTransformer2DModel
from torch import Tensor

import hddm
from hddm.calibration import FILE_NAME, KAPPA, Calibration, Moments, bounded_gain
from hddm.data.images import to_unit_range
from hddm.data.shards import load_shard
from hddm.experts.records import Expert, ExpertRecord, save_expert
from hddm.networks.folders import WEIGHTS
from hddm.training.calibrate import recalibrate
from hddm.training.continuation import continue_expert
from hddm.training.expert import train_expert
from hddm.velocity import PredictionType
from tests.artefacts import CLASSES, contents, copied, draw, edit_json, expert_settings, shard_record
from tests.cases import case_named
from tests.oracles import GaussianMixture

DIM, SHAPE = 16, (1, 4, 4)
GAUSSIAN = GaussianMixture.random(seed=0, modes=1, dim=DIM)
TIMES = [0.0, 0.1, 0.3, 0.5, 0.7, 0.75, 0.8, 0.9, 0.97, 0.99, 0.999, 1 - 1e-6, 1.0]


def _states(t: float, num: int = 64) -> tuple[Tensor, Tensor]:
    times = torch.full((num,), t, dtype=torch.float64)
    return GAUSSIAN.states(times, seed=3, shape=SHAPE), times


@pytest.fixture(scope="module")
def continued(shards: Path, ddpm_expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The DDPM expert of shard 0, trained on in shard 1 with flow matching; its weights have a licence."""
    init = copied(ddpm_expert, tmp_path_factory.mktemp("init"))
    edit_json(init / "expert.json", licence="CC-BY-NC-4.0")
    out = tmp_path_factory.mktemp("continued") / "expert"
    continue_expert(init, shards / "shard_1", out, expert_settings("flow", steps=3))
    return out


def test_an_expert_trained_on_says_what_it_came_from(
    shards: Path, ddpm_expert: Path, continued: Path
) -> None:
    before, facts = (json.loads((folder / "expert.json").read_text()) for folder in (ddpm_expert, continued))
    kept = ["prediction_type", "schedule", "schedule_source", "time_scale", "sample_shape", "conditions"]
    for key in [*kept, "classes", "null_class", "source", "space", "latent_scale"]:
        assert facts[key] == before[key]
    assert facts["prediction_type"] == "epsilon"
    assert facts["objective"] == "flow"
    assert facts["weights"] == "ema"
    assert facts["licence"] == "CC-BY-NC-4.0"
    assert facts["training_calibration"] is True
    assert facts["shard"] == shard_record(shards / "shard_1")
    training = facts["training"]
    assert training["kappa"] == KAPPA
    assert training["init"] == ddpm_expert.name
    assert training["init_sha256"] == hashlib.sha256((ddpm_expert / WEIGHTS).read_bytes()).hexdigest()
    assert training["steps"] == 3
    assert "size" not in training


def test_its_calibration_is_the_blend_on_the_new_shards_moments(shards: Path, continued: Path) -> None:
    calibration, images = Calibration.load(continued), load_shard(shards / "shard_1").images
    expected = bounded_gain(PredictionType.EPSILON, 1.0, Moments.of(images))
    assert torch.equal(calibration.times, expected.times)
    assert torch.equal(calibration.weights, expected.weights)
    assert torch.equal(calibration.moments.mean, expected.moments.mean)
    assert calibration.times.tolist() == pytest.approx([0, 1 - 1 / KAPPA, 1])
    assert calibration.weights.unique().tolist() == [0, 1]


def test_training_on_trains_and_repeats_itself(shards: Path, ddpm_expert: Path, tmp_path: Path) -> None:
    settings = expert_settings("flow", steps=3)
    for name in ("one", "two"):
        continue_expert(ddpm_expert, shards / "shard_1", tmp_path / name, settings)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one[WEIGHTS] == two[WEIGHTS] != contents(ddpm_expert)[WEIGHTS]
    assert one[FILE_NAME] == two[FILE_NAME]


def test_an_expert_trained_on_twice_keeps_the_calibration_that_its_weights_know(
    shards: Path, continued: Path, tmp_path: Path
) -> None:
    settings = expert_settings("flow", steps=1, learning_rate=1e-9)
    again = tmp_path / "again"
    continue_expert(continued, shards / "shard_0", again, settings, kappa=16.0)
    assert contents(again)[FILE_NAME] == contents(continued)[FILE_NAME]
    assert json.loads((again / "expert.json").read_text())["training"]["kappa"] == KAPPA
    before, after = hddm.load(continued), hddm.load(again)
    for t in TIMES:
        x, times = _states(t)
        # A step of the smallest size: what it learned before is all there.
        torch.testing.assert_close(after.velocity(x, times), before.velocity(x, times), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("objective", ["flow", "ddpm"])
def test_the_first_loss_is_that_of_the_init(
    objective: str, shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    """Over a large batch, against the same expectation from states drawn here."""
    settings = expert_settings(objective, steps=1, batch_size=8192)
    (found,) = continue_expert(ddpm_expert, shards / "shard_1", tmp_path / "out", settings)
    field, images = hddm.load(ddpm_expert), load_shard(shards / "shard_1").images
    noise = torch.Generator().manual_seed(0)
    x_0 = images[torch.randint(len(images), (8192,), generator=noise)]
    t, eps = torch.rand(8192, generator=noise, dtype=torch.float64), torch.randn(x_0.shape, generator=noise)
    path = field.schedule if objective == "ddpm" else case_named("linear").schedule
    alpha, sigma = (value.float().view(-1, 1, 1, 1) for value in path.alpha_sigma(t))
    y = alpha * x_0 + sigma * eps
    with torch.no_grad():
        if objective == "ddpm":
            expected = (field.network(y, 1000 * t.float()) - eps).square().mean()
        else:
            field.calibration = bounded_gain(field.prediction_type, field.range[1], Moments.of(images))
            expected = (field.velocity(y, t) - (eps - x_0)).square().mean()
    assert found == pytest.approx(expected.item(), rel=0.03)


def test_ddpm_goes_on_as_ddpm(shards: Path, ddpm_expert: Path, tmp_path: Path) -> None:
    continue_expert(ddpm_expert, shards / "shard_1", tmp_path / "out", expert_settings("ddpm", steps=2))
    facts = json.loads((tmp_path / "out" / "expert.json").read_text())
    assert facts["objective"] == "ddpm"
    assert facts["training_calibration"] is False
    assert "kappa" not in facts["training"]
    file = tmp_path / "out" / FILE_NAME
    before = file.read_bytes()
    recalibrate(tmp_path / "out", shards / "shard_1", seed=7)
    assert file.read_bytes() == before


def test_a_flow_expert_needs_no_blend_and_is_calibrated_anew(
    shards: Path, flow_expert: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    continue_expert(flow_expert, shards / "shard_0", out, expert_settings("flow", steps=2))
    facts = json.loads((out / "expert.json").read_text())
    assert facts["training_calibration"] is False
    images = load_shard(shards / "shard_0").images
    assert torch.equal(Calibration.load(out).moments.mean, Moments.of(images).mean)


@pytest.mark.parametrize("kind", ["sample", "v_prediction", "flow_prediction"])
def test_every_prediction_type_can_be_trained_on(
    kind: str, shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    init, out = copied(ddpm_expert, tmp_path), tmp_path / "out"
    edit_json(init / "expert.json", prediction_type=kind)
    losses = continue_expert(
        init, shards / "shard_1", out, expert_settings("flow", steps=60, ema_decay=0.5, warmup=5)
    )
    assert sum(losses[-10:]) < sum(losses[:10])
    assert json.loads((out / "expert.json").read_text())["prediction_type"] == kind


def _held_out_loss(folder: Path) -> float:
    field = hddm.load(folder)
    x_0 = to_unit_range(torch.cat([draw(name, 256, seed=50) for name in CLASSES]))
    noise = torch.Generator().manual_seed(1)
    t = (torch.arange(len(x_0), dtype=torch.float64) + 0.5) / len(x_0)
    t, eps = t[torch.randperm(len(t), generator=noise)], torch.randn(x_0.shape, generator=noise)
    wide = t.float().view(-1, 1, 1, 1)
    with torch.no_grad():
        v = field.velocity((1 - wide) * x_0 + wide * eps, t)
    return (v - (eps - x_0)).square().mean().item()


def test_training_on_beats_a_fresh_start(whole: Path, tmp_path: Path) -> None:
    train_expert(whole, tmp_path / "init", expert_settings("ddpm", steps=300, batch_size=64))
    few = expert_settings("flow", steps=20, batch_size=64)
    continue_expert(tmp_path / "init", whole, tmp_path / "continued", few)
    train_expert(whole, tmp_path / "scratch", few)
    assert _held_out_loss(tmp_path / "continued") < 0.8 * _held_out_loss(tmp_path / "scratch")


@pytest.mark.parametrize("conditional", [True, False])
def test_classes_are_learned_or_left_out(
    conditional: bool, whole: Path, class_expert: Path, tmp_path: Path
) -> None:
    settings = expert_settings("flow", steps=2, class_conditional=conditional)
    continue_expert(class_expert, whole, tmp_path / "out", settings)
    facts = json.loads((tmp_path / "out" / "expert.json").read_text())
    assert tuple(facts["classes"]) == CLASSES
    assert facts["null_class"] == 2
    after, before = (
        hddm.load(folder).network.class_embed.weight for folder in (tmp_path / "out", class_expert)
    )
    # Decay shrinks the classes that nothing asks for, all numbers alike.
    assert ((after / before)[:2].std() > 1e-6) == conditional
    assert (after / before)[2].std() > 1e-6


def test_a_network_of_diffusers_is_trained_on_without_its_own_dropping_of_labels(
    shards: Path, tmp_path: Path
) -> None:
    """Its classes are not the shard's; noise beside a variance, on a schedule that ends before t = 1."""
    network = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=1,
        out_channels=2,
        num_layers=1,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=3,
        norm_num_groups=1,
    )
    facts = ExpertRecord(
        objective="ddpm",
        prediction_type=PredictionType.EPSILON,
        schedule=case_named("ddpm-linear").schedule.config,
        schedule_source="scheduler_config.json",
        time_scale=1.0,
        sample_shape=SHAPE,
        variance_head=True,
        conditions=("class_labels",),
        classes=("a", "b", "c"),
        null_class=3,
    )
    init = tmp_path / "init"
    init.mkdir()
    save_expert(init, Expert(network, facts, None))
    settings = expert_settings("flow", steps=60, ema_decay=0.5, warmup=5)
    for name in ("one", "two"):
        losses = continue_expert(init, shards / "shard_0", tmp_path / name, settings)
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert contents(tmp_path / "one")[WEIGHTS] == contents(tmp_path / "two")[WEIGHTS]
    samples = hddm.sample(hddm.load(tmp_path / "one"), 4, steps=4)
    assert samples.isfinite().all()
    calibration = Calibration.load(tmp_path / "one")
    assert calibration.weights[-1].unique().item() == 1
