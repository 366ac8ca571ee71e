"""Calibrating an expert on a shard, or on what it draws itself by its own sampler."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DDIMScheduler

import hddm
from hddm.calibration import Calibration
from hddm.calibration_records import FILE_NAME, calibration_record
from hddm.data.shards import open_shard
from hddm.experts.ensemble_folders import replace_file
from hddm.experts.expert_folders import open_expert
from hddm.experts.records import WEAK_FILE
from hddm.networks.transformers import ExpertTransformer
from hddm.training.calibrate import (
    calibrate,
    native_conditions,
    native_samples,
    native_times,
    recalibrate,
)
from hddm.training.expert import new_network
from hddm.utils.errors import HddmError
from hddm.utils.streams import Use, generator
from hddm.velocity import VelocityField
from tests.artefacts import (
    contents,
    copied,
    edit_json,
    killed_at_every_change,
    largest_file,
    refusal,
)
from tests.cases import case_named
from tests.oracles import BoundedNetwork, GaussianMixture, NoisyEpsilon, OracleNetwork, rms_error

DIM, SHAPE = 16, (1, 4, 4)
GAUSSIAN = GaussianMixture.random(seed=0, modes=1, dim=DIM)
NAMES = ["cosine", "sd-scaled-linear", "ddpm-linear", "squaredcos-cap-v2", "sd-scaled-linear-ztsnr"]


def _oracle(name: str, kind: str = "epsilon", shard: GaussianMixture = GAUSSIAN) -> VelocityField:
    case = case_named(name)
    network = OracleNetwork(shard, case.alpha_sigma, kind)
    return VelocityField(network, case.schedule, kind, sample_shape=SHAPE)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["cosine", "sd-scaled-linear-ztsnr"])
def test_samples_have_the_mean_and_covariance_of_the_data(name: str) -> None:
    num = 1024
    drawn = native_samples(_oracle(name), num, steps=100, batch_size=1024).flatten(1).double()
    covariance, end = GAUSSIAN.covariances[0], 1 - native_times(_oracle(name), 100)[0][0]
    # Noise without the signal that the end of the range still holds is what DDIM starts from.
    limit = 4 * (covariance.diagonal().mean() / num) ** 0.5 + end * GAUSSIAN.mean.abs().max()
    assert (drawn.mean(0) - GAUSSIAN.mean).abs().max() < limit
    # That of num exact samples would be off by about trace/sqrt(num); the rest is the solver's.
    limit = 1.5 * covariance.trace() / num**0.5 + 0.02 * covariance.norm()
    assert (drawn.T.cov() - covariance).norm() < limit


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
def test_they_are_those_of_diffusers_ddim(kind: str) -> None:
    case, network, steps = case_named("sd-scaled-linear"), BoundedNetwork(), 20
    field = VelocityField(network, case.schedule, kind, sample_shape=SHAPE)
    found = native_samples(field, 5, seed=3, steps=steps)
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=kind,
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=True,
    )
    scheduler.set_timesteps(steps)
    streams = [generator(3, Use.NATIVE_NOISE, i) for i in range(5)]
    y = torch.stack([torch.randn(SHAPE, generator=one) for one in streams])
    for timestep in scheduler.timesteps:
        y = scheduler.step(network(y, timestep.expand(5)), timestep, y).prev_sample
    torch.testing.assert_close(found, y, rtol=1e-3, atol=2e-3)


def test_a_sample_depends_on_seed_and_number_alone() -> None:
    field = _oracle("cosine")
    all_at_once = native_samples(field, 7, seed=2, steps=5)
    torch.testing.assert_close(native_samples(field, 7, seed=2, steps=5, batch_size=2), all_at_once)
    assert torch.equal(native_samples(field, 3, seed=2, steps=5), all_at_once[:3])
    assert not torch.equal(native_samples(field, 3, seed=4, steps=5), all_at_once[:3])
    # A calibration of the expert has no part in them.
    field.calibration = calibrate(field.velocity, 10 + GAUSSIAN.sample(64, seed=1, shape=SHAPE))
    assert torch.equal(native_samples(field, 7, seed=2, steps=5), all_at_once)


@pytest.mark.parametrize("modes", [1, 6])
def test_samples_calibrate_a_noisy_expert_like_its_shard_does(modes: int) -> None:
    shard, case = (
        GaussianMixture.random(seed=0, modes=modes, dim=DIM, spread=0.8),
        case_named("cosine"),
    )
    network = NoisyEpsilon(shard, case.alpha_sigma, "epsilon")
    raw = VelocityField(network, case.schedule, "epsilon", sample_shape=SHAPE)
    data = shard.sample(512, seed=1, shape=SHAPE)
    found = {
        "data": calibrate(raw.velocity, data),
        "native": calibrate(raw.velocity, native_samples(raw, 512, batch_size=512)),
    }
    for t in (0.9, 0.95, 0.99):
        times = torch.full((2048,), t, dtype=torch.float64)
        x_t = shard.states(times, seed=77, shape=SHAPE)
        truth, net = shard.velocity(x_t, times), raw.velocity(x_t, times)
        errors = {name: rms_error(it.apply(net, x_t, times), truth) for name, it in found.items()}
        assert errors["native"] < 0.6 * rms_error(net, truth)
        assert errors["native"] < 1.5 * errors["data"] + 0.02


@pytest.mark.integration
def test_a_calibration_says_what_it_was_fitted_to(
    shards: Path, ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    shard = open_shard(shards / "shard_0")
    on_shard = {"data": f"shard {shard.hash}", "images": str(len(shard)), "seed": "7"}
    assert calibration_record(ddpm_expert) == on_shard
    expert = copied(ddpm_expert, tmp_path)
    before = contents(expert)
    recalibrate(expert, seed=5, num_images=32, steps=4)
    native = {"data": "native samples", "images": "32", "seed": "5", "steps": "4"}
    assert calibration_record(expert) == native
    assert Calibration.load(expert).record == native
    after = contents(expert)
    assert {name for name in after if after[name] != before[name]} == {FILE_NAME, "manifest.json"}
    recalibrate(expert, seed=5, num_images=32, steps=4)
    assert contents(expert) == after


def test_classes_are_drawn_uniformly_and_what_stands_for_no_prompt_is_used_with_a_warning() -> None:
    arguments = (BoundedNetwork(), case_named("linear").schedule, "flow_prediction")
    field = VelocityField(*arguments, conditions=["class_labels"], classes=["a", "b", "c"])
    labels = native_conditions(field, 3000)["class_labels"]
    assert ((torch.bincount(labels) - 1000).abs() < 120).all()
    assert torch.equal(native_conditions(field, 40)["class_labels"], labels[:40])
    null = torch.arange(6.0).view(2, 3)
    field = VelocityField(*arguments, conditions=["text"], null_conditions={"text": null})
    said = r"calibrated without text.*hddm\.training\.calibrate\.calibrate takes data with"
    with pytest.warns(UserWarning, match=said):
        assert torch.equal(native_conditions(field, 4)["text"], null.expand(4, 2, 3))
    with pytest.raises(HddmError, match="its samples need text"):
        native_conditions(VelocityField(*arguments, conditions=["text"]), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native_conditions(VelocityField(*arguments, conditions=[]), 4) == {}


@pytest.mark.integration
def test_what_cannot_be_calibrated_stays_as_it_was(
    shards: Path, ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    """An expert of prompts or for a part of t without data, and an expert on a full disk."""
    prompts = copied(flow_expert, tmp_path)
    new_network(ExpertTransformer, "tiny", SHAPE, 0, text_dim=8).save_pretrained(prompts)
    (prompts / WEAK_FILE).unlink()
    edit_json(prompts / "expert.json", conditions=["encoder_hidden_states"])
    full, part = copied(ddpm_expert, tmp_path), copied(ddpm_expert, tmp_path / "part")
    edit_json(part / "expert.json", noise_range=[0.75, 1])
    before = contents(tmp_path)
    assert "covers only a part of t, so it cannot sample alone; pass `data`" in refusal(
        recalibrate, part
    )
    with pytest.raises(HddmError, match=r"its samples need encoder_hidden_states.*pass `data`"):
        recalibrate(prompts)
    with largest_file(1000), pytest.raises(HddmError, match=r"cannot be written.*File too large"):
        recalibrate(full, shards / "shard_0", seed=8)
    assert contents(tmp_path) == before
    recalibrate(part, shards / "shard_0")
    assert Calibration.load(part).times[:2].tolist() == [0, 0.75]


@pytest.mark.slow
def test_a_killed_calibration_leaves_expert_and_ensemble_as_before_or_as_after(
    ensemble: Path, shards: Path, tmp_path: Path
) -> None:
    whole = copied(ensemble, tmp_path)
    (whole / "experts" / "notes.txt").write_text("mine")
    expert = whole / "experts" / "0"
    before = contents(whole)
    record = open_expert(expert).record
    old = Calibration.load(expert)
    assert old is not None
    new = replace(old, weights=old.weights / 2)

    def check() -> None:
        assert hddm.load(expert).calibration is not None
        hddm.load(whole)
        replace_file(expert, record, FILE_NAME, old.save)
        assert contents(tmp_path) == {
            f"{whole.name}/{name}": content for name, content in before.items()
        }

    assert (
        killed_at_every_change(
            lambda: replace_file(expert, record, FILE_NAME, new.save),
            check,
            ("os.rename", "os.rmdir"),
        )
        > 8
    )
    found = Calibration.load(expert)
    assert found is not None
    assert torch.equal(found.weights, new.weights)
    hddm.load(whole)
