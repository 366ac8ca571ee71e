"""Experts of others: what is wrong with one is found before it is used."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.data.images import save_png
from hddm.data.partition import partition
from hddm.data.shards import load_shard
from hddm.errors import HddmError
from hddm.model_folders import WEIGHTS
from hddm.predictions import PredictionType
from hddm.schedules import LinearSchedule
from hddm.tensors import generator
from hddm.training import judging
from hddm.training.continuation import continue_expert
from hddm.training.denoising import Denoising, Level, denoising
from hddm.training.expert import train_expert
from hddm.training.verify import verify_expert
from hddm.velocity import VelocityField
from tests.artefacts import CLASSES, Command, copied, draw, edit_json, expert_settings


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory, whole: Path) -> Path:
    """Images like those of the one shard, which nothing was trained on."""
    folder = tmp_path_factory.mktemp("held_out")
    for seed, name in enumerate(CLASSES, 10):
        (folder / "images" / name).mkdir(parents=True)
        for index, image in enumerate(draw(name, 12, seed)):
            save_png(image, folder / "images" / name / f"{index}.png")
    (shard,) = partition(folder / "images", folder / "shards", 1)
    edit_json(shard / "manifest.json", held_out_of=load_shard(whole).hash)
    return shard


def test_a_trained_expert_is_accepted_by_images_kept_from_it(class_expert: Path, held_out: Path) -> None:
    verdict = verify_expert(class_expert, held_out)
    assert verdict.accepted
    assert not verdict.notes
    assert verdict.files[WEIGHTS] == hashlib.sha256((class_expert / WEIGHTS).read_bytes()).hexdigest()
    assert set(verdict.files) == {path.name for path in class_expert.iterdir()}
    assert verdict.images == 24
    assert verdict.denoising is not None
    assert verdict.denoising.margin > 3 * verdict.denoising.deviation
    assert verdict.unconditional is not None
    assert verdict.unconditional.expert > verdict.denoising.expert
    assert verdict.denoising == verify_expert(class_expert, held_out).denoising
    assert verdict.denoising != verify_expert(class_expert, held_out, seed=1).denoising


def test_images_that_it_was_trained_on_are_told_from_those_kept(class_expert: Path, whole: Path) -> None:
    verdict = verify_expert(class_expert, whole)
    assert verdict.accepted
    (note,) = verdict.notes
    assert "was trained on these images" in note


def test_an_untrained_expert_is_refused(whole: Path, held_out: Path, tmp_path: Path) -> None:
    train_expert(whole, tmp_path / "expert", expert_settings("flow", steps=1, learning_rate=1e-9))
    verdict = verify_expert(tmp_path / "expert", held_out)
    (problem,) = verdict.problems
    assert "untrained" in problem or "hardly trained" in problem


def test_a_record_that_says_wrongly_what_is_predicted_is_refused(
    class_expert: Path, held_out: Path, tmp_path: Path
) -> None:
    folder = copied(class_expert, tmp_path)
    for wrong in (PredictionType.SAMPLE, PredictionType.EPSILON):
        edit_json(folder / "expert.json", prediction_type=wrong.value)
        assert "what it predicts" in verify_expert(folder, held_out).problems[0]


def _save(folder: Path, weights: dict[str, Tensor]) -> None:
    """Replace the weights of an expert, and its record of them."""
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    sha256 = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    edit_json(folder / "expert.json", weights_sha256=sha256)


def test_weights_other_than_those_recorded_are_refused(class_expert: Path, tmp_path: Path) -> None:
    folder = copied(class_expert, tmp_path)
    weights = load_file(folder / WEIGHTS)
    weights["class_embed.weight"][0, 0] += 1
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    (problem,) = verify_expert(folder).problems
    assert re.fullmatch(
        r"its weights have SHA-256 \w{16}…, and expert.json says \w{16}…; copy the expert again from where "
        "it was trained, or train it anew",
        problem,
    )
    edit_json(folder / "expert.json", weights_sha256=None)
    verdict = verify_expert(folder)
    assert verdict.accepted
    assert "holds no hash of the weights" in verdict.notes[0]


def test_an_expert_of_the_wrong_sign_is_refused(class_expert: Path, held_out: Path, tmp_path: Path) -> None:
    folder = copied(class_expert, tmp_path)
    weights = load_file(folder / WEIGHTS)
    last = [
        name for name in weights if name.endswith(("linear.weight", "linear.bias")) and "layers" not in name
    ]
    assert len(last) == 2
    _save(folder, weights | {name: -weights[name] for name in last})
    assert "no better than a Gaussian" in verify_expert(folder, held_out).problems[0]


def test_weights_that_are_not_finite_are_refused(class_expert: Path, tmp_path: Path) -> None:
    folder = copied(class_expert, tmp_path)
    weights = load_file(folder / WEIGHTS)
    weights["pos_embed"].view(-1)[3] = float("nan")
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    (problem,) = verify_expert(folder).problems
    assert "pos_embed" in problem
    assert "NaN" in problem


def test_a_calibration_that_is_not_finite_is_refused(class_expert: Path, tmp_path: Path) -> None:
    folder = copied(class_expert, tmp_path)
    tensors = load_file(folder / CALIBRATION)
    tensors["weights"][-1, 0] = float("inf")
    save_file(tensors, folder / "calibration.safetensors")
    assert verify_expert(folder).problems == ("calibration.safetensors, weights: holds NaN or Inf",)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda found: found["weights"][-1].fill_(-1e4), "has weights from -10000 to "),
        (lambda found: found["weights"][0].fill_(1.5), "has weights from 0 to 1.5, and they lie in [0, 1]"),
        (lambda found: found["variances"][-1].fill_(0), "has a variance of 0, and they are above 0"),
        (lambda found: found["times"][2].fill_(2), "has times that do not rise from 0 to 1"),
        (lambda found: found["times"][-1].fill_(0.99), "has times that do not rise from 0 to 1"),
        (lambda found: found.update(weights=found["weights"][:-1]), "shapes of its tensors do not go"),
        (lambda found: found.update(basis=found["basis"][:, 1:]), "shapes of its tensors do not go"),
    ],
)
def test_a_calibration_that_no_fit_gives_is_refused(
    change: Callable[[dict[str, Tensor]], object], problem: str, class_expert: Path, tmp_path: Path
) -> None:
    folder = copied(class_expert, tmp_path)
    tensors = {name: value.clone() for name, value in load_file(folder / CALIBRATION).items()}
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / CALIBRATION)
    (found,) = verify_expert(folder).problems
    assert found.startswith("calibration.safetensors: ")
    assert problem in found


def test_every_calibration_that_is_made_is_accepted(
    shards: Path, ddpm_expert: Path, flow_expert: Path, class_expert: Path, tmp_path: Path
) -> None:
    """Fitted to a shard, and the blends that noise, samples and v are trained on in."""
    for folder in (ddpm_expert, flow_expert, class_expert):
        assert verify_expert(folder).accepted
    for kind in ("epsilon", "sample", "v_prediction"):
        init = copied(ddpm_expert, tmp_path / kind)
        edit_json(init / "expert.json", prediction_type=kind)
        continue_expert(init, shards / "shard_1", tmp_path / kind / "on", expert_settings("flow", steps=1))
        assert verify_expert(tmp_path / kind / "on").accepted


def test_a_calibration_that_is_spoilt_near_the_noise_alone_is_refused(
    class_expert: Path, held_out: Path, tmp_path: Path
) -> None:
    """Its mean is off, and counts from the last time before t = 1 on."""
    folder = copied(class_expert, tmp_path)
    tensors = load_file(folder / CALIBRATION)
    tensors["weights"][:-1] = 0
    tensors["weights"][-1] = 1
    tensors["mean"] += 3
    save_file(tensors, folder / CALIBRATION)
    (problem,) = verify_expert(folder, held_out).problems
    assert problem.startswith("at t = 0.99 its error is ")
    assert "its calibration is spoilt; hddm calibrate fits another" in problem


def _stub(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Verifying finds these errors, on whatever images."""
    late = (Level(0.95, 0.5, 0.5, 1.5), Level(0.99, 0.5, 0.5, 1.5), Level(1.0, 0.5, 0.5, 1.5))
    found = Denoising((Level(0.5, 0.4, 0.5, 1.5),), 0.1, 0.01, 0.1, 0.01, late)
    monkeypatch.setattr(judging, "denoising", lambda *_: replace(found, **changes))


def test_what_a_network_of_noise_does_by_itself_near_the_end_is_noted(
    whole: Path, held_out: Path, tmp_path: Path
) -> None:
    """An error of the noise counts 1/(1 - t)² times there, and the moments alone cannot tell classes."""
    out = tmp_path / "expert"
    train_expert(whole, out, expert_settings("ddpm", steps=150, batch_size=64, class_conditional=True))
    assert verify_expert(out, held_out).accepted
    tensors = load_file(out / CALIBRATION)
    tensors["weights"][2:] = 0.8
    save_file(tensors, out / CALIBRATION)
    verdict = verify_expert(out, held_out)
    assert verdict.accepted
    (note,) = verdict.notes
    assert note.startswith("at t = 0.99 its error is ")
    assert note.endswith("train it for longer")
    (out / CALIBRATION).unlink()
    verdict = verify_expert(out, held_out)
    assert verdict.accepted
    (note,) = verdict.notes
    assert note.endswith("it has no calibration; hddm calibrate fits one")


@pytest.mark.parametrize("which", ["margin", "low"])
def test_an_expert_that_chance_makes_better_is_not_accepted(
    which: str, class_expert: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deviation = {"margin": "deviation", "low": "low_deviation"}[which]
    _stub(monkeypatch, **{which: 0.041, deviation: 0.02})
    assert verify_expert(class_expert, held_out).accepted
    _stub(monkeypatch, **{which: 0.039, deviation: 0.02})
    problem = verify_expert(class_expert, held_out).problems[0]
    assert "0.0390 ± 0.0200 below a Gaussian's, so it is not shown to be better" in problem
    assert "take more held-out images than 24" in problem


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_an_expert_is_judged_without_its_class_too_if_it_learned_that(
    dropout: float, class_expert: Path, held_out: Path, tmp_path: Path
) -> None:
    folder = copied(class_expert, tmp_path)
    weights = load_file(folder / WEIGHTS)
    weights["class_embed.weight"][2] += 30 * torch.randn(
        weights["class_embed.weight"][2].shape, generator=generator(0)
    )
    _save(folder, weights)
    training = json.loads((folder / "expert.json").read_text())["training"]
    edit_json(folder / "expert.json", training=training | {"condition_dropout": dropout})
    verdict = verify_expert(folder, held_out)
    assert verdict.accepted == (dropout == 0)
    (found,) = verdict.notes if dropout == 0 else verdict.problems
    assert found.startswith("without class_labels: it denoises no better than a Gaussian")


def test_a_device_that_is_not_there_is_a_clear_error(class_expert: Path, hddm: Command) -> None:
    for name in ("cuda:99", "toaster"):
        code, _, err = hddm("verify", class_expert, "--device", name)
        assert code == 1
        assert err.startswith(f"hddm: --device {name}: is not available here (")
        assert err.count("\n") == 1


def test_images_of_another_shard_are_refused(class_expert: Path, shards: Path) -> None:
    (problem,) = verify_expert(class_expert, shards / "shard_1").problems
    assert "the expert of shard 0" in problem
    assert load_shard(shards / "shard_1").hash[:16] in problem


def test_an_expert_that_does_not_say_where_it_comes_from_is_refused(
    class_expert: Path, tmp_path: Path
) -> None:
    folder = copied(class_expert, tmp_path)
    edit_json(folder / "expert.json", training={}, shard=None)
    which, how = verify_expert(folder).problems
    assert "which shard" in which
    assert "no record of its training" in how


def test_the_command_prints_hashes_and_figures_and_exits_by_the_verdict(
    class_expert: Path, held_out: Path, shards: Path, tmp_path: Path, hddm: Command
) -> None:
    folder = copied(class_expert, tmp_path)
    (folder / "setup.py").write_text("print()")
    code, out, _ = hddm("verify", folder, "--data", held_out)
    assert code == 0
    for path in folder.iterdir():
        assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}" in out.splitlines()
    assert "note: setup.py: is no file of an expert's" in out
    assert [float(line.split()[0]) for line in out.splitlines() if line[:4] in ("  0.", "  1.")] == [
        *(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        *(0.95, 0.99, 1.0),
    ]
    assert "without its conditions by" in out
    code, out, err = hddm("verify", folder, "--data", shards / "shard_0", "--json")
    assert code == 1
    found = json.loads(out)
    assert not found["accepted"]
    assert "take images of its own" in err
    assert found["problems"][0] in err
    assert hddm("verify", tmp_path / "none")[0] == 1


@pytest.mark.parametrize("variance", [0.1, 2.0])
def test_errors_on_gaussian_images_are_the_posterior_variance(variance: float) -> None:
    """x_0 ~ N(m, c I), so Var(eps - x_0 | x_t) = c/((1 - t)² c + t²)."""
    mean = torch.linspace(-1, 1, 16).view(1, 4, 4)
    drawn = torch.randn(2000, 1, 4, 4, generator=generator(0))
    images = mean + variance**0.5 * (drawn - drawn.mean(0)) / drawn.std()

    def exact(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        t = timestep.view(-1, 1, 1, 1)
        posterior = mean + (1 - t) * variance / ((1 - t) ** 2 * variance + t**2) * (x - (1 - t) * mean)
        return (x - posterior) / t

    field = VelocityField(exact, LinearSchedule(), "flow_prediction", sample_shape=(1, 4, 4))
    found = denoising(field, images)
    for level in (*found.levels, *found.late):
        least = variance / ((1 - level.t) ** 2 * variance + level.t**2)
        assert level.expert == pytest.approx(least, rel=0.03)
        assert level.gaussian == pytest.approx(least, rel=0.03)
        assert level.zero == pytest.approx(1 + variance + mean.square().mean().item(), rel=0.03)
    assert abs(found.margin) < 0.01 * found.gaussian
    assert found.expert <= found.gaussian


def test_one_image_judges_nothing() -> None:
    field = VelocityField(lambda x, t: x, LinearSchedule(), "flow_prediction", sample_shape=(1, 4, 4))
    with pytest.raises(HddmError, match="at least 2 images, not 1"):
        denoising(field, torch.zeros(1, 1, 4, 4))
