"""Training an expert on, as a whole or by an adapter: what it learns, keeps and records."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiTTransformer2DModel
from safetensors.torch import load_file

import hddm
from hddm.calibration import Calibration, Moments
from hddm.calibration_records import FILE_NAME
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.data.partition import partition
from hddm.data.shards import open_shard
from hddm.experts.adapter_records import ADAPTER_WEIGHTS
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import open_expert, save_expert
from hddm.experts.records import EXPERT_FILE, ExpertRecord
from hddm.inspection.folders import inspected
from hddm.training.bounded_gain import KAPPA, bounded_gain
from hddm.training.calibrate import recalibrate
from hddm.training.continuation import continue_expert
from hddm.training.expert import train_expert
from hddm.training.settings import RunOptions
from hddm.utils.errors import HddmError
from hddm.utils.records import WEIGHTS
from hddm.velocity import PredictionType
from tests.artefacts import (
    CLASSES,
    Died,
    contents,
    copied,
    edit_json,
    ending_at,
    expert_settings,
    refusal,
    shard_record,
    write_images,
)
from tests.cases import case_named
from tests.oracles import GaussianMixture

DIM, SHAPE = 16, (1, 4, 4)
GAUSSIAN = GaussianMixture.random(seed=0, modes=1, dim=DIM)
TIMES = [0.0, 0.1, 0.3, 0.5, 0.7, 0.75, 0.8, 0.9, 0.97, 0.99, 0.999, 1 - 1e-6, 1.0]


@pytest.fixture(scope="module")
def continued(shards: Path, ddpm_expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The DDPM expert of shard 0, trained on in shard 1 with flow matching; its weights have a licence."""
    init = copied(ddpm_expert, tmp_path_factory.mktemp("init"))
    edit_json(init / "expert.json", licence="CC-BY-NC-4.0")
    out = tmp_path_factory.mktemp("continued") / "expert"
    continue_expert(init, shards / "shard_1", out, expert_settings("flow", steps=3))
    return out


def test_an_expert_trained_on_records_what_it_came_from_and_the_blend_on_the_new_shards_moments(
    shards: Path, ddpm_expert: Path, continued: Path
) -> None:
    before, facts = (
        json.loads((folder / "expert.json").read_text()) for folder in (ddpm_expert, continued)
    )
    changed = {"objective": "flow", "licence": "CC-BY-NC-4.0", "training_calibration": True}
    changed["shard"] = shard_record(shards / "shard_1")
    assert facts | {"training": 0} == before | {"training": 0} | changed
    sha256 = hashlib.sha256((ddpm_expert / WEIGHTS).read_bytes()).hexdigest()
    begun = {"kappa": KAPPA, "init": ddpm_expert.name, "init_sha256": sha256, "steps": 3}
    assert facts["training"].items() >= begun.items()
    assert "size" not in facts["training"]
    # The velocity is learned through the prediction of the network.
    assert facts["training"]["prediction"] == facts["prediction_type"] == "epsilon"
    calibration, images = Calibration.load(continued), open_shard(shards / "shard_1").images
    blend = bounded_gain(PredictionType.EPSILON, 1.0, Moments.of(images))
    assert torch.equal(calibration.times, blend.times)
    assert torch.equal(calibration.weights, blend.weights)
    assert torch.equal(calibration.moments.mean, blend.moments.mean)
    assert calibration.times.tolist() == pytest.approx([0, 1 - 1 / KAPPA, 1])
    assert calibration.weights.unique().tolist() == [0, 1]


def test_an_expert_goes_on_in_its_part_of_t_or_in_one_that_is_said(
    shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    """By flow matching, whose velocity is refused outside it, and by its own objective."""
    high, narrow, shard = tmp_path / "high", tmp_path / "narrow", shards / "shard_1"
    settings = expert_settings("flow", steps=2, noise_range=(0.7, 1))
    continue_expert(ddpm_expert, shard, high, settings)
    continue_expert(
        high, shard, tmp_path / "again", settings.model_copy(update={"noise_range": None})
    )
    ddpm = expert_settings("ddpm", steps=2, noise_range=(0.8, 0.9))
    continue_expert(ddpm_expert, shard, narrow, ddpm)
    for name, part in (("high", (0.7, 1)), ("again", (0.7, 1)), ("narrow", (0.8, 0.9))):
        assert hddm.load(tmp_path / name).noise_range == part


def test_an_expert_trained_on_twice_keeps_the_calibration_that_its_weights_know(
    shards: Path, continued: Path, tmp_path: Path
) -> None:
    settings = expert_settings("flow", steps=1, learning_rate=1e-9)
    again = tmp_path / "again"
    continue_expert(continued, shards / "shard_0", again, settings)
    assert contents(again)[FILE_NAME] == contents(continued)[FILE_NAME]
    assert json.loads((again / "expert.json").read_text())["training"]["kappa"] == KAPPA
    before, after = hddm.load(continued), hddm.load(again)
    for t in TIMES:
        x, times = GAUSSIAN.states_at(t, 64, 3, SHAPE)
        # A step of the smallest size: what it learned before is all there.
        torch.testing.assert_close(
            after.velocity(x, times), before.velocity(x, times), rtol=1e-4, atol=1e-4
        )


@pytest.mark.integration
@pytest.mark.parametrize(
    ("prediction", "objective"),
    [
        ("epsilon", "flow"),
        ("sample", "ddpm"),
        pytest.param("epsilon", "ddpm", marks=pytest.mark.slow),
        pytest.param("sample", "flow", marks=pytest.mark.slow),
    ],
)
def test_the_first_loss_of_an_expert_of_ddpm_is_that_of_the_init(
    prediction: str, objective: str, shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    """Over a large batch, against states drawn here; a loss in x_0 is that in velocity, t bounded at 0.05."""
    init, out, num = ddpm_expert, tmp_path / "out", 16384
    if prediction == "sample":
        init = tmp_path / "init"
        train_expert(
            shards / "shard_0", init, expert_settings("ddpm", steps=60, prediction="sample")
        )
    settings = expert_settings(objective, steps=1, batch_size=num)
    (found,) = continue_expert(init, shards / "shard_1", out, settings)
    facts = json.loads((out / "expert.json").read_text())
    needs_blend = (prediction, objective) == ("epsilon", "flow")
    assert (facts["prediction_type"], facts["training_calibration"]) == (prediction, needs_blend)
    field, images = hddm.load(init), open_shard(shards / "shard_1").images
    field.calibration = None
    if needs_blend:
        field.calibration = bounded_gain(field.prediction_type, field.range[1], Moments.of(images))
    noise = torch.Generator().manual_seed(0)
    x_0 = images[torch.randint(len(images), (num,), generator=noise)]
    eps, native = torch.randn(x_0.shape, generator=noise), torch.rand(num, generator=noise).double()
    path = field.schedule if objective == "ddpm" else case_named("linear").schedule
    alpha, sigma = (value.view(-1, 1, 1, 1) for value in path.alpha_sigma(native))
    t = sigma / (alpha + sigma)
    with torch.no_grad():
        if (prediction, objective) == ("epsilon", "ddpm"):
            error = field.network((alpha * x_0 + sigma * eps).float(), 1000 * native.float()) - eps
        else:
            error = field.velocity(((1 - t) * x_0 + t * eps).float(), t.flatten()) - (eps - x_0)
    if prediction == "sample":
        error = (t / t.clamp(min=0.05)) * error
        trained = {"flow": "trained by flow matching", "ddpm": "trained as DDPM"}[objective]
        began = "its network predicts sample, as the checkpoint it began with"
        assert inspected(out)["summary"] == f"{trained}; {began}"
    each = error.square().flatten(1).mean(1)
    # Both are means of as many draws; in x_0 of a loss with a long tail.
    deviation = (2 / num) ** 0.5 * each.std()
    assert deviation < 0.04 * each.mean()
    assert abs(found - each.mean()) < (
        4 * deviation if prediction == "sample" else 0.03 * each.mean()
    )


@pytest.mark.integration
def test_an_expert_that_goes_on_as_it_was_needs_no_blend_and_is_calibrated_anew(
    shards: Path, ddpm_expert: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    continue_expert(ddpm_expert, shards / "shard_1", out, expert_settings("ddpm", steps=2))
    facts = json.loads((out / "expert.json").read_text())
    assert (facts["objective"], facts["training_calibration"]) == ("ddpm", False)
    assert "kappa" not in facts["training"]
    before = (out / FILE_NAME).read_bytes()
    recalibrate(out, shards / "shard_1", seed=7)
    assert (out / FILE_NAME).read_bytes() == before


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


@pytest.mark.integration
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


def _refused(
    init: Path, shard: Path, tmp_path: Path, objective: str = "flow", **changes: Any
) -> str:
    settings = expert_settings(objective, steps=1, **changes)
    message = refusal(continue_expert, init, shard, tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()
    return message


def test_what_does_not_fit_the_init_is_refused(
    whole: Path,
    class_expert: Path,
    ddpm_expert: Path,
    flow_expert: Path,
    continued: Path,
    tmp_path: Path,
) -> None:
    (large,) = partition(write_images(tmp_path / "images", side=6), tmp_path / "large", 1)
    assert "its shape is (1, 6, 6), the expert's (1, 4, 4)" in _refused(
        ddpm_expert, large, tmp_path
    )
    other, asked = copied(class_expert, tmp_path), {"class_conditional": True}
    edit_json(other / "expert.json", classes=["cats", "dogs"])
    message = _refused(other, whole, tmp_path, **asked)
    assert f"its classes are ['columns', 'rows'], those of {other} ['cats', 'dogs']" in message
    edit_json(other / "expert.json", null_class=None)
    assert "no empty default for class_labels" in _refused(other, whole, tmp_path)
    for init in (flow_expert, continued):
        assert "was trained with flow matching" in _refused(init, whole, tmp_path, "ddpm")


def test_the_calibration_of_a_training_is_not_fitted_anew_and_an_init_that_lost_it_is_refused(
    whole: Path, continued: Path, tmp_path: Path
) -> None:
    before = contents(continued)
    for data in (whole, None):
        with pytest.raises(HddmError, match="calibration, which must not change"):
            recalibrate(continued, data, num_images=16, steps=1)
    assert contents(continued) == before
    init = copied(continued, tmp_path)
    (init / FILE_NAME).unlink()
    assert "differs from its manifest" in _refused(init, whole, tmp_path)


@pytest.fixture(scope="module")
def adapter(shards: Path, ddpm_expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The DDPM expert of shard 0, adapted to shard 1 with flow matching."""
    out = tmp_path_factory.mktemp("adapted") / "expert"
    continue_expert(
        ddpm_expert, shards / "shard_1", out, expert_settings("flow", lora_rank=2, lora_alpha=4)
    )
    return out


def test_only_attention_and_mlps_differ_from_the_base_and_by_the_rank(
    ddpm_expert: Path, adapter: Path
) -> None:
    before, after = (
        open_expert(folder).read().network.state_dict() for folder in (ddpm_expert, adapter)
    )
    targets = json.loads((adapter / EXPERT_FILE).read_text())["adapter"]["targets"]
    for name, weight in before.items():
        assert (name in targets) != torch.equal(weight, after[name])
    for name in targets:
        singular = torch.linalg.svdvals((after[name] - before[name]).double())
        assert singular[2] < 1e-6 < singular[0]
    inside = [name for name in before if name.startswith("layers.")]
    assert set(targets) == {
        name
        for name in inside
        if name.endswith(("in_proj_weight", "out_proj.weight", "mlp.0.weight", "mlp.2.weight"))
    }


def test_a_stopped_run_keeps_the_adapter_alone_and_goes_on_exactly(
    shards: Path, ddpm_expert: Path, adapter: Path, tmp_path: Path
) -> None:
    """With activation checkpointing, which changes nothing."""
    settings = expert_settings("flow", lora_rank=2, lora_alpha=4, gradient_checkpointing=True)
    given, run = (
        (ddpm_expert, shards / "shard_1", tmp_path / "out", settings),
        RunOptions(checkpoint_every=3),
    )
    base = contents(ddpm_expert)
    with pytest.raises(Died):
        continue_expert(*given, on_step=ending_at(4), run=run)
    (weights,) = tmp_path.glob("out.run/checkpoints/*/weights.safetensors")
    assert all(".lora_" in name for name in load_file(weights))
    continue_expert(*given, run=run.model_copy(update={"resume": True}))
    assert contents(ddpm_expert) == base
    straight, resumed = contents(adapter), contents(tmp_path / "out")
    assert straight[ADAPTER_WEIGHTS] == resumed[ADAPTER_WEIGHTS]
    assert straight[CALIBRATION] == resumed[CALIBRATION]


def test_an_adapter_can_be_trained_on_as_a_whole_but_not_adapted(
    shards: Path, adapter: Path, tmp_path: Path
) -> None:
    settings = expert_settings("flow", steps=1, learning_rate=1e-9)
    continue_expert(adapter, shards / "shard_1", tmp_path / "out", settings)
    facts = json.loads((tmp_path / "out" / EXPERT_FILE).read_text())
    sha256 = hashlib.sha256((adapter / ADAPTER_WEIGHTS).read_bytes()).hexdigest()
    assert (facts["adapter"], facts["training"]["init_sha256"]) == (None, sha256)
    merged = open_expert(adapter).read().network.state_dict()
    for name, weight in load_file(tmp_path / "out" / WEIGHTS).items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(
        HddmError, match=r"holds no diffusion_pytorch_model.safetensors that could be"
    ):
        continue_expert(
            adapter, shards / "shard_1", tmp_path / "on", expert_settings("flow", lora_rank=2)
        )
