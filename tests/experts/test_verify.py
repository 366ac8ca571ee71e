"""Experts of others: what is wrong with one is found before it is used."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.checkpoints.convert import write
from hddm.checkpoints.plan import plan_conversion
from hddm.data.images import save_png
from hddm.data.partition import partition
from hddm.data.shards import open_shard
from hddm.experts import denoising as judging
from hddm.experts.denoising import denoising
from hddm.experts.kept import keep_component, whole_components
from hddm.experts.loading import load
from hddm.experts.verify import verify_expert
from hddm.schedules import LinearSchedule
from hddm.settings import Conversion
from hddm.training.calibrate import recalibrate
from hddm.training.expert import train_expert
from hddm.utils.files import read_json
from hddm.utils.records import HASHES, MANIFEST, WEIGHTS
from hddm.velocity import PredictionType, VelocityField
from tests.artefacts import CLASSES, Command, copied, draw, edit_json, expert_settings, seal
from tests.checkpoint_files import pipeline, plain_unet
from tests.component_files import write_vae
from tests.conftest import Trio

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory, whole: Path) -> Path:
    """Images like those of the one shard, which nothing was trained on."""
    folder = tmp_path_factory.mktemp("held_out")
    for seed, name in enumerate(CLASSES, 10):
        (folder / "images" / name).mkdir(parents=True)
        for index, image in enumerate(draw(name, 12, seed)):
            save_png(image, folder / "images" / name / f"{index}.png")
    (shard,) = partition(folder / "images", folder / "shards", 1)
    edit_json(shard / "manifest.json", held_out_of=open_shard(whole).hash)
    return shard


@pytest.mark.integration
def test_a_trained_expert_is_accepted_by_images_kept_from_it(
    class_expert: Path, held_out: Path
) -> None:
    verdict = verify_expert(class_expert, held_out)
    assert (verdict.accepted, verdict.notes, verdict.images) == (True, [], 24)
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in class_expert.iterdir()
    }
    assert verdict.files == files
    assert verdict.denoising is not None
    assert verdict.denoising.margin > 3 * verdict.denoising.deviation
    assert verdict.denoising == verify_expert(class_expert, held_out).denoising
    assert verdict.denoising != verify_expert(class_expert, held_out, seed=1).denoising


@pytest.mark.slow
def test_an_expert_for_a_part_of_t_is_judged_there(
    whole: Path, held_out: Path, tmp_path: Path
) -> None:
    settings = expert_settings("flow", steps=100, batch_size=64, noise_range=(0.6, 1.0))
    train_expert(whole, tmp_path / "expert", settings)
    verdict = verify_expert(tmp_path / "expert", held_out)
    assert verdict.accepted
    assert verdict.denoising is not None
    shares = [(level.t - 0.6) / 0.4 for level in verdict.denoising.levels]
    assert shares == pytest.approx([k / 10 for k in range(1, 10)])
    assert len(verdict.denoising.late) == 3


@pytest.mark.slow
def test_an_untrained_expert_and_one_that_records_what_it_does_not_predict_are_refused(
    whole: Path, class_expert: Path, held_out: Path, tmp_path: Path
) -> None:
    train_expert(whole, tmp_path / "expert", expert_settings("flow", steps=1, learning_rate=1e-9))
    (problem,) = verify_expert(tmp_path / "expert", held_out).problems
    assert "untrained" in problem or "hardly trained" in problem
    folder = copied(class_expert, tmp_path)
    for wrong in (PredictionType.FLOW_PREDICTION, PredictionType.EPSILON):
        edit_json(folder / "expert.json", prediction_type=wrong.value)
        reading, generic = verify_expert(folder, held_out).problems[:2]
        assert reading.startswith(f"these weights predict sample, the record says {wrong.value}: ")
        assert "what it predicts" in generic
    edit_json(folder / "expert.json", training={}, shard=None)
    shard, training = verify_expert(folder).problems
    assert "which shard" in shard
    assert "no record of its training" in training

    def negate(weights: dict[str, Tensor]) -> None:
        ends = ("linear.weight", "linear.bias")
        last = [name for name in weights if name.endswith(ends) and "layers" not in name]
        assert len(last) == 2
        weights.update({name: -weights[name] for name in last})

    wrong_sign = _changed(class_expert, tmp_path / "sign", WEIGHTS, negate)
    assert "no better than a Gaussian" in verify_expert(wrong_sign, held_out).problems[0]

    def spoil(weights: dict[str, Tensor]) -> None:
        weights["pos_embed"].view(-1)[3] = float("nan")

    (problem,) = verify_expert(_changed(class_expert, tmp_path / "nan", WEIGHTS, spoil)).problems
    assert "pos_embed" in problem
    assert "NaN" in problem


def _noise_network(data: Tensor, scheduler: DDPMScheduler) -> UNet2DModel:
    """A DDPM UNet, trained a little on ``data`` by a loop of diffusers."""
    blocks = {
        "down_block_types": ("DownBlock2D",),
        "up_block_types": ("UpBlock2D",),
        "norm_num_groups": 8,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = UNet2DModel(4, 1, 1, layers_per_block=1, block_out_channels=(32,), **blocks)
        optimizer = torch.optim.AdamW(network.parameters(), 3e-3)
        for _ in range(200):
            x_0 = data[torch.randint(len(data), (32,))]
            eps, time = torch.randn_like(x_0), torch.randint(1000, (len(x_0),))
            loss = (network(scheduler.add_noise(x_0, eps, time), time).sample - eps).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory, whole: Path) -> Path:
    """A DDPM UNet, trained a little by a loop of diffusers, and converted with ``whole`` to try it on."""
    folder = tmp_path_factory.mktemp("unet")
    scheduler = DDPMScheduler(beta_schedule="squaredcos_cap_v2")
    network = _noise_network(open_shard(whole).images, scheduler)
    source = pipeline(folder / "source", network, scheduler)
    write(plan_conversion(source, Conversion()), folder / "unet")
    return folder / "unet"


# On so few images scaled_linear betas fit as well as the squaredcos_cap_v2 that the network was trained with.
TRUE_BETAS = "(squaredcos_cap_v2|scaled_linear) betas"
FORGERIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "sample": ({"prediction_type": "sample"}, "predict epsilon", "sample"),
    "linear betas": ({"beta_schedule": "linear"}, f"take {TRUE_BETAS}", "linear betas"),
    "time_scale": ({"time_scale": 2.0}, "take .*time_scale 1", "time_scale 2"),
}
OTHERS = sorted(FORGERIES.keys() - {"sample"})


@pytest.mark.slow
@pytest.mark.parametrize("forgery", ["sample", *(pytest.param(one, marks=SLOW) for one in OTHERS)])
def test_a_record_under_which_the_weights_fit_worse_than_under_another_is_refused(
    forgery: str, unet: Path, held_out: Path, whole: Path, tmp_path: Path, hddm: Command
) -> None:
    assert verify_expert(unet, held_out).accepted
    changes, true, stated = FORGERIES[forgery]
    forged = copied(unet, tmp_path)
    if beta_schedule := changes.get("beta_schedule"):
        schedule = json.loads((unet / "expert.json").read_text())["schedule"]
        changes = {"schedule": schedule | {"beta_schedule": beta_schedule}}
    edit_json(forged / "expert.json", **changes)
    figures = r"(?P<best>\d+\.\d\d) against (?P<stated>\d+\.\d\d)"
    found = rf"these weights {true}.*, the record says .*{stated}.*: {figures}"
    code, _, err = hddm("verify", forged, "--data", held_out)
    match = re.search(found, err)
    assert (code, match is not None) == (1, True), err
    assert match is not None
    assert float(match["best"]) < 0.95 * float(match["stated"])
    with pytest.warns(UserWarning, match=found):
        recalibrate(forged, whole)


@pytest.mark.integration
def test_convert_tries_what_a_source_states_on_images(
    unet: Path, whole: Path, images: Path, tmp_path: Path, hddm: Command
) -> None:
    source, found = unet.parent / "source", f"take {TRUE_BETAS}"
    config = json.loads((source / "scheduler" / "scheduler_config.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(config | {"beta_schedule": "linear"}))
    for options, is_told in ((("--schedule", tmp_path / "other.json"), True), ((), False)):
        out = tmp_path / str(is_told)
        code, _, err = hddm("convert", source, "--out", out, "--data", whole, *options)
        assert (code, re.search(found, err) is not None) == (0, is_told), err
        assert "could not be told" not in err
    assert hddm("convert", source, "--out", tmp_path / "no", "--data", images)[0] == 2
    assert not (tmp_path / "no").exists()


@pytest.mark.integration
def test_convert_says_where_images_cannot_tell(whole: Path, tmp_path: Path, hddm: Command) -> None:
    source = pipeline(tmp_path / "random", plain_unet(in_channels=1, out_channels=1, sample_size=4))
    code, _, err = hddm("convert", source, "--out", tmp_path / "unet", "--data", whole)
    assert code == 0
    assert "could not be told from these images" in err


@pytest.mark.slow
def test_no_reading_is_taken_for_better_by_chance_or_for_want_of_training(
    whole: Path, held_out: Path, tmp_path: Path, unet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = open_shard(held_out)
    source = pipeline(tmp_path / "random", plain_unet(in_channels=1, out_channels=1, sample_size=4))
    write(plan_conversion(source, Conversion()), tmp_path / "unet")
    for objective, steps in (("ddpm", 1), ("ddpm", 30), ("flow", 30)):
        settings = expert_settings(objective, steps=steps, prediction="epsilon")
        train_expert(whole, tmp_path / f"{objective}{steps}", settings)
    for folder in (unet, *(tmp_path / name for name in ("unet", "ddpm1", "ddpm30", "flow30"))):
        field = load(folder)
        assert isinstance(field, VelocityField)
        field.calibration = None
        for images in (2, 3, 8, 64):
            monkeypatch.setattr(judging, "READ_IMAGES", images)
            assert judging.misread(field, few, 0) is None


def _changed(
    expert: Path, parent: Path, file: str, change: Callable[[dict[str, Tensor]], object]
) -> Path:
    """A copy of an expert, its tensors in ``file`` changed in place and recorded as its own."""
    folder = copied(expert, parent)
    tensors = {name: value.clone() for name, value in load_file(folder / file).items()}
    change(tensors)
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        folder / file,
        {"format": "pt"},
    )
    seal(folder)
    return folder


def test_a_calibration_that_is_spoilt_near_the_noise_alone_is_refused(
    class_expert: Path, held_out: Path, tmp_path: Path
) -> None:
    """Its mean is off, and counts where nothing was measured any more."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["weights"][:] = (tensors["times"] > 0.97)[:, None]
        tensors["mean"] += 3
        tensors["class_means"] += 3

    (problem,) = verify_expert(
        _changed(class_expert, tmp_path, CALIBRATION, spoil), held_out
    ).problems
    assert problem.startswith("at t = 0.99 its error is ")
    assert "its calibration is damaged; copy the expert again" in problem


def test_a_wrong_call_is_told_from_a_bad_expert_by_its_code(
    class_expert: Path, held_out: Path, router: Path, shards: Path, tmp_path: Path, hddm: Command
) -> None:
    folder = copied(class_expert, tmp_path)
    _spoil_last_byte(folder / WEIGHTS)
    damaged = copied(held_out, tmp_path)
    next((damaged / "images").rglob("*.png")).write_bytes(b"spoilt")
    for options, told in (
        ((folder, "--data", shards / "shard_0"), "use its own images"),
        (
            (folder, "--data", shards),
            f"none of its 2 shards is that of {folder}, which is of shard ",
        ),
        ((folder, "--data", damaged), "its content changed since the partition"),
        ((router,), "holds no expert.json, nor does a folder in it"),
    ):
        code, out, err = hddm("verify", *options)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert told in err
    assert hddm("verify", folder, "--data", held_out)[0] == 1


def test_an_ensemble_is_refused_for_a_file_and_for_code_that_is_not_its_own(
    ensemble: Path, tmp_path: Path, hddm: Command
) -> None:
    folder = copied(ensemble, tmp_path)
    assert hddm("assemble", folder, "--diffusers-pipeline")[0] == 0
    code, out, _ = hddm("verify", folder)
    assert (code, out.splitlines()[-1]) == (
        0,
        f"{folder}: all 2 experts passed; pass --data to measure the denoising error too",
    )
    with (folder / "pipeline.py").open("a") as file:
        file.write("print('more')\n")
    refused = f"hddm: {folder}: failed"
    code, _, err = hddm("verify", folder)
    assert (code, err.splitlines()[0]) == (1, refused)
    assert f"{folder}/pipeline.py: is not hddm's, and diffusers would run it; remove it" in err
    # hddm itself reads no such file.
    assert hddm("assemble", folder, "--diffusers-pipeline")[0] == 0
    _spoil_last_byte(folder / "router" / WEIGHTS)
    code, _, err = hddm("verify", folder)
    assert (code, err.splitlines()) == (1, [refused, f"  {folder}/router/{WEIGHTS}: has changed"])


@pytest.mark.integration
def test_a_folder_of_experts_is_verified_a_line_each_by_the_images_of_each(
    class_expert: Path, trio: Trio, held_out: Path, tmp_path: Path, hddm: Command
) -> None:
    """A partition may be unfinished, and experts have their own shards among others'."""
    experts, data = tmp_path / "experts", tmp_path / "held_out"
    for name, source in (("expert_10", class_expert), ("expert_2", trio.experts[1])):
        shutil.copytree(source, experts / name)
    (experts / "expert_2.run").mkdir()
    shutil.copytree(held_out, data / "shard_0")
    shutil.copytree(trio.shards / "shard_1", data / "shard_1")
    code, out, err = hddm("verify", experts, "--data", data)
    # Of two steps of training, images say so.
    assert code == 1
    assert re.match(rf"{experts}/expert_2: failed; error [\d.]+ on \d+ images \(a Gaussian: ", out)
    assert f"\n{experts}/expert_10: passed; error " in out
    assert err.startswith(f"hddm: {experts}: 1 of 2 experts failed\n  {experts}/expert_2: ")
    # One that was converted names no shard.
    checkpoint = {"layout": "diffusers-folder", "files": {"a": "b"}, "options": {}, "hddm": "1"}
    edit_json(experts / "expert_10" / "expert.json", shard=None, source=checkpoint)
    out = hddm("verify", experts, "--data", data)[1]
    assert (
        f"{experts}/expert_10: passed; it records no shard, so it was not tested on images" in out
    )


@pytest.mark.parametrize("variance", [0.1, 2.0])
def test_errors_on_gaussian_images_are_the_posterior_variance(variance: float) -> None:
    """x_0 ~ N(m, c I), so Var(eps - x_0 | x_t) = c/((1 - t)² c + t²)."""
    mean = torch.linspace(-1, 1, 16).view(1, 4, 4)
    drawn = torch.randn(2000, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    images = mean + variance**0.5 * (drawn - drawn.mean(0)) / drawn.std()

    def exact(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        t = timestep.view(-1, 1, 1, 1)
        posterior = mean + (1 - t) * variance / ((1 - t) ** 2 * variance + t**2) * (
            x - (1 - t) * mean
        )
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


def _spoil_last_byte(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.slow
def test_a_range_of_pixels_that_is_not_that_of_the_training_is_told(
    whole: Path, held_out: Path, tmp_path: Path, hddm: Command
) -> None:
    """Of a UNet that learned noise on pixels in [0, 1]."""
    scheduler = DDPMScheduler()
    network = _noise_network(open_shard(whole).images / 2 + 0.5, scheduler)
    source = pipeline(tmp_path / "source", network, scheduler)
    told = r"these weights take .*data from 0 to 1, the record says .*data from -1 to 1: "
    for options, is_told in (((), True), (("--data-range", "0,1"), False)):
        out = tmp_path / str(is_told)
        code, _, err = hddm("convert", source, "--out", out, "--data", whole, *options)
        assert (code, re.search(told, err) is not None) == (0, is_told), err
        code, _, err = hddm("verify", out, "--data", held_out)
        assert (code, re.search(told, err) is not None) == (int(is_told), is_told), err


def test_every_file_of_an_expert_is_hashed_also_those_that_were_verified_before(
    class_expert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing disk changes content alone, which a cache of hashes by size and time does not see."""
    monkeypatch.setattr("hddm.utils.records.SMALL", 0)
    folder = copied(class_expert, tmp_path)
    write_vae(tmp_path / "vae")
    keep_component(folder, "vae", tmp_path / "vae")
    assert verify_expert(folder).accepted
    expected = read_json(folder / "vae" / MANIFEST)["files"][WEIGHTS]
    with (folder / "vae" / WEIGHTS).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    now = (folder / "vae" / WEIGHTS).stat()
    state = [expected, now.st_size, now.st_ino, now.st_mtime_ns, now.st_ctime_ns]
    (folder / "vae" / HASHES).write_text(json.dumps({WEIGHTS: state}))
    assert list(whole_components(folder)) == ["vae"]
    assert f"{WEIGHTS}: has changed" in verify_expert(folder).problems
