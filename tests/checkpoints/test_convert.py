"""hddm convert on checkpoints with their own tools' outputs and on experts, and what it leaves behind."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, ModelMixin, StableDiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTokenizer

import hddm as library
from hddm.checkpoints import convert
from hddm.checkpoints.plan import plan_conversion
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import save_expert
from hddm.experts.records import EXPERT_FILE, ExpertRecord, read_expert_record
from hddm.schedules import CosineSchedule, LinearSchedule, Schedule, from_diffusers
from hddm.settings import Conversion
from hddm.utils.errors import HddmError
from hddm.utils.files import sha256_of
from hddm.utils.records import damage
from hddm.velocity import PredictionType
from tests.artefacts import Command, contents, edit_json, largest_file
from tests.checkpoint_files import (
    SD_BETAS,
    conditions_of,
    converted,
    dit,
    pipeline,
    pixart,
    plain_unet,
    record_of,
    refused,
    shared_checkpoint,
    text_unet,
    written_back,
)
from tests.component_files import write_clip, write_vae
from tests.transformer_files import dit_network

WEIGHTS, BACK = "diffusion_pytorch_model.safetensors", "checkpoint.safetensors"
PICKLED = ("--allow-pickle", "--num-heads", 4)
LAYOUTS = ["facebook-dit", "pixart-original"]
LAYOUTS += [f"diffusers-{name}" for name in ("dit", "pixart", "unet2d", "unet2d-condition")]


@pytest.mark.integration
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tools_own_outputs_are_reproduced_and_its_file_comes_back(
    hddm: Command, tmp_path: Path, layout: str
) -> None:
    source, expert, back = shared_checkpoint(layout), tmp_path / "expert", tmp_path / "back"
    options = () if layout.startswith("diffusers") else PICKLED
    assert f"layout: {layout}" in converted(hddm, source, expert, *options)
    truth = load_file(source / "reference.safetensors")
    field = library.load(expert)
    given = {
        name: truth[name] for name in ("class_labels", "encoder_hidden_states") if name in truth
    }
    difference = field.velocity(truth["x_t"], truth["t"], **given) - truth["velocity"]
    assert difference.abs().max() <= 1e-4 * truth["velocity"].std()
    assert hddm("assemble", expert, "--out", tmp_path / "ensemble")[0] == 0
    # The mean of a network and itself is that network.
    assert hddm("merge", expert, expert, "--out", tmp_path / "merged")[0] == 0
    expected = _weights(source)
    ensembled, merged = tmp_path / "ensemble/experts/0", tmp_path / "merged"
    for one, out in ((expert, back), (ensembled, tmp_path / "back1"), (merged, tmp_path / "back2")):
        found = _weights(written_back(hddm, one, out, layout))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    converted(hddm, back, tmp_path / "again", *options[1:])
    assert contents(tmp_path / "again")[WEIGHTS] == contents(expert)[WEIGHTS]
    if layout.startswith("diffusers"):
        before, after = (record_of(tmp_path / name) for name in ("expert", "again"))
        assert all(
            before[key] == after[key] for key in ("schedule", "prediction_type", "conditions")
        )


@pytest.mark.integration
@torch.no_grad()
def test_a_pipeline_comes_back_out_of_an_ensemble_whole(hddm: Command, tmp_path: Path) -> None:
    """Stable Diffusion's own pipeline makes the same picture of it as of the source."""
    parts = tmp_path / "parts"
    of_text = {
        "text_encoder": write_clip(parts),
        "tokenizer": CLIPTokenizer.from_pretrained(parts / "tokenizer"),
    }
    scheduler = DDIMScheduler(**SD_BETAS, steps_offset=1, clip_sample=False)
    pipe = StableDiffusionPipeline(
        **{"vae": write_vae(parts / "vae"), "unet": text_unet(), "scheduler": scheduler},
        **{**of_text, "safety_checker": None, "feature_extractor": None},
    )
    pipe.save_pretrained(tmp_path / "source")
    converted(hddm, tmp_path / "source", tmp_path / "expert")
    assert hddm("assemble", tmp_path / "expert", "--out", tmp_path / "ensemble")[0] == 0
    one = tmp_path / "ensemble/experts/0"
    back = written_back(hddm, one, tmp_path / "back", "diffusers-unet2d-condition")
    again = StableDiffusionPipeline.from_pretrained(back)
    given = {"prompt": "a cat", "num_inference_steps": 2, "output_type": "np"}
    images = [
        each(**given, generator=torch.Generator().manual_seed(0)).images for each in (pipe, again)
    ]
    assert np.array_equal(*images)


def _weights(folder: Path) -> dict[str, Tensor]:
    files = [one for one in folder.rglob("*") if one.suffix in (".pt", ".pth", ".safetensors")]
    (path,) = [one for one in files if one.name != "reference.safetensors"]
    if path.suffix == ".safetensors":
        return load_file(path)
    content = torch.load(path, weights_only=True)
    return next(content[key] for key in ("ema", "state_dict") if key in content)


@pytest.mark.parametrize("make", [dit, pixart, plain_unet, text_unet])
@torch.no_grad()
def test_fractions_of_timesteps_reach_networks_in_half_precision(
    hddm: Command, tmp_path: Path, make: Callable[[], ModelMixin]
) -> None:
    source = pipeline(tmp_path / "source", make().bfloat16())
    converted(hddm, source, tmp_path / "expert")
    field, fed = library.load(tmp_path / "expert", dtype=torch.bfloat16), []
    network = field.network
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    network.register_forward_hook(lambda module, given, output: fed.append((given[1], output)))
    schedule = from_diffusers(source)
    channels = field.sample_shape[0]
    x = torch.randn(1, channels, 8, 8, generator=torch.Generator().manual_seed(0))
    for wanted in (987.17, 988.49):
        time = torch.tensor([wanted], dtype=torch.float64)
        t = schedule.sigma(time) / (schedule.alpha(time) + schedule.sigma(time))
        norm = torch.hypot(1 - t, t).float()
        velocity = field.velocity(x * norm, t, **conditions_of(make()))
        assert (velocity.dtype, velocity.shape, fed[-1][0].dtype) == (
            x.dtype,
            x.shape,
            torch.float32,
        )
        assert abs(fed[-1][0].item() - wanted) < 1e-2
    assert fed[0][1].shape[1] == channels
    assert not torch.equal(fed[0][1], fed[1][1])


def test_a_dry_run_writes_nothing_and_an_existing_folder_is_kept_without_the_option(
    hddm: Command, tmp_path: Path
) -> None:
    source = pipeline(tmp_path / "dit", dit())
    assert "predicts: epsilon" in converted(hddm, source, tmp_path / "expert", "--dry-run")
    assert list(tmp_path.iterdir()) == [source]
    converted(hddm, source, tmp_path / "expert")
    assert "--overwrite" in refused(hddm, source, out=tmp_path / "expert")
    edit_json(source / "scheduler" / "scheduler_config.json", prediction_type="sample")
    converted(hddm, source, tmp_path / "expert", "--overwrite")
    assert record_of(tmp_path / "expert")["prediction_type"] == "sample"
    before = contents(tmp_path)
    assert hddm("convert", source, "--out", source, "--overwrite")[0] == 1
    assert contents(tmp_path) == before


def test_a_full_disk_and_an_interruption_leave_nothing(
    hddm: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pipeline(tmp_path / "dit", dit())
    with largest_file(4096):
        refused(hddm, source)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_compare", stop)
    assert hddm("convert", source, "--out", tmp_path / "expert")[0] != 0
    assert list(tmp_path.iterdir()) == [source]


def test_the_record_of_a_source_survives_a_second_conversion_and_the_way_back(
    hddm: Command, tmp_path: Path
) -> None:
    source, first = pipeline(tmp_path / "dit", dit()), tmp_path / "first"
    sampling = {"clip_sample": False, "steps_offset": 1, "timestep_spacing": "trailing"}
    edit_json(source / "scheduler" / "scheduler_config.json", **sampling)
    converted(hddm, source, first, "--prediction-type", "epsilon")
    facts = record_of(first)
    assert (facts["variance_head"], facts["sample_shape"]) == (True, [4, 8, 8])
    assert facts["schedule_source"] == "scheduler/scheduler_config.json"
    origin, config = facts["source"], json.loads((first / "config.json").read_text())
    assert (origin["layout"], origin["options"]["prediction_type"]) == ("diffusers-dit", "epsilon")
    assert len(origin["files"][WEIGHTS]) == 64
    assert config["_class_name"] == "DiTTransformer2DModel"
    converted(hddm, first, tmp_path / "second")
    found = record_of(tmp_path / "second")["source"]
    assert (found["layout"], found["before"]) == ("hddm", origin)
    back = written_back(hddm, tmp_path / "second", tmp_path / "back", "diffusers-dit")
    assert (
        sampling.items()
        <= json.loads((back / "scheduler" / "scheduler_config.json").read_text()).items()
    )
    assert "cannot hold the" in refused(hddm, first, "--to-layout", "facebook-dit", "--dry-run")
    assert "convert it first" in refused(hddm, source, "--to-layout", "diffusers-dit")
    # Indices of the file's schedule, fed at the time scale of a continuous one, would be off 1,000-fold.
    assert "states its own schedule" in refused(hddm, first, "--prediction-type", "sample")


LINEAR_BETAS = {"_class_name": "DDPMScheduler", "beta_start": 1e-4, "beta_end": 0.02}


def _dit_expert(
    folder: Path, schedule: Schedule | None = None, kind: str = "epsilon", **changes: object
) -> Path:
    """An expert with adaLN-Zero, its weights all random."""
    schedule = schedule or from_diffusers(LINEAR_BETAS)
    sizes = {"hidden_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3, "in_channels": 2}
    record = {
        "objective": "ddpm",
        "prediction_type": kind,
        "schedule": schedule.config,
        "schedule_source": "the test",
        "time_scale": 1000.0 if schedule.end == 1 else 1.0,
        "sample_shape": (2, 8, 8),
        "conditions": ("class_labels",),
        "classes": ("a", "b", "c"),
        "null_class": 3,
    }
    folder.mkdir()
    facts = ExpertRecord.model_validate(record | changes)
    save_expert(folder, Expert(dit_network(**sizes, out_channels=None), facts, None))
    return folder


def test_a_checkpoint_for_a_part_of_t_is_said_to_be_one(hddm: Command, tmp_path: Path) -> None:
    """As the high-noise model of a pair, whose files do not say it."""
    source, expert = (
        pipeline(tmp_path / "unet", plain_unet(1), DDPMScheduler()),
        tmp_path / "expert",
    )
    text = converted(hddm, source, expert, "--noise-range", "0.875:1")
    assert "noise range: t = 0.875 … 1 alone\n" in text
    assert record_of(expert)["noise_range"] == [0.875, 1.0]
    assert record_of(expert)["source"]["options"]["noise_range"] == [0.875, 1.0]
    # The check took place within it.
    times = [float(one) for one in re.findall(r"at t = ([0-9.]+)", text)]
    assert len(times) == 3
    assert 0.875 < min(times) < max(times) < 0.994
    converted(hddm, expert, tmp_path / "again")
    assert record_of(tmp_path / "again")["noise_range"] == [0.875, 1.0]
    said = "--noise-range 0.995:1: must be LOW:HIGH, with 0 <= LOW < HIGH <= 1, and meet the schedule's own"
    assert said in refused(hddm, source, "--noise-range", "0.995:1")


def test_weights_go_back_only_where_they_mean_the_same(hddm: Command, tmp_path: Path) -> None:
    rule = "means epsilon on DiscreteSchedule of 1000 linear betas"
    for name, changes, said in (
        ("schedule", {"schedule": CosineSchedule()}, rule),
        ("prediction", {"kind": "v_prediction"}, rule),
        ("flow", {"schedule": LinearSchedule(), "kind": "flow_prediction"}, rule),
        ("calibration", {"training_calibration": True}, "trained together with its calibration"),
    ):
        expert = _dit_expert(tmp_path / name, **changes)
        assert said in refused(hddm, expert, "--to-layout", "facebook-dit")


def test_weights_that_follow_the_rule_of_a_layout_may_go_there(
    hddm: Command, tmp_path: Path
) -> None:
    expert = _dit_expert(tmp_path / "expert")
    file = written_back(hddm, expert, tmp_path / "out", "facebook-dit") / BACK
    converted(hddm, file, tmp_path / "again", "--num-heads", 2)
    first, again = load_file(expert / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_dit_in_half_precision_is_converted_and_stays_in_it(
    hddm: Command, tmp_path: Path
) -> None:
    expert = _dit_expert(tmp_path / "expert")
    file = written_back(hddm, expert, tmp_path / "file", "facebook-dit") / BACK
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    converted(hddm, file, tmp_path / "half", "--num-heads", 2)
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / WEIGHTS).values()} == {
        torch.float16
    }
    velocity = library.load(tmp_path / "half").velocity(torch.randn(2, 2, 8, 8), torch.tensor(0.5))
    assert velocity.isfinite().all()


def test_a_file_that_would_be_written_as_it_is_is_copied_and_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pipeline(tmp_path / "dit", dit())
    hashed: list[str] = []

    def count(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(convert, "sha256_of", count)
    monkeypatch.setattr(convert, "write_safetensors", None)
    convert.write(plan_conversion(source, Conversion()), tmp_path / "out")
    weights = source / "transformer" / WEIGHTS
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == weights.read_bytes()
    assert hashed == [WEIGHTS]
    record = read_expert_record(tmp_path / "out").source
    assert record is not None
    assert record.files == {WEIGHTS: sha256_of(weights)}
    assert not list(damage(tmp_path / "out", EXPERT_FILE))


def test_a_file_with_other_numbers_is_not_taken_for_what_would_be_written(tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    plan = plan_conversion(source, Conversion())
    first, *others = plan.built.tensors
    other = replace(first, read=lambda: first.read() + 1)
    changed = replace(plan, built=replace(plan.built, tensors=[*others, other]))
    convert.write(changed, tmp_path / "out", check=False)
    found = load_file(tmp_path / "out" / WEIGHTS)
    assert torch.equal(found[first.name], first.read() + 1)
    assert all(torch.equal(found[one.name], one.read()) for one in others)
    assert not list(damage(tmp_path / "out", EXPERT_FILE))


def test_a_copied_file_with_a_number_that_is_not_finite_is_refused(
    hddm: Command, tmp_path: Path
) -> None:
    network = dit()
    next(network.parameters()).data.view(-1)[-1] = float("nan")
    assert "holds NaN or Inf; get the weights again" in refused(
        hddm, pipeline(tmp_path / "dit", network)
    )


@pytest.mark.parametrize("made", [dit, plain_unet], ids=["linear layers", "convolutions"])
def test_weights_that_are_cast_where_they_are_used_are_those_of_float32(
    made: Callable[[], ModelMixin],
) -> None:
    network = made().to(torch.bfloat16).eval()
    side = network.config.sample_size
    state = torch.randn(2, network.config.in_channels, side, side)
    own = {"class_labels": torch.tensor([0, 1])} if made is dit else {}
    timestep = torch.tensor([10, 900])
    with torch.no_grad():
        with convert._InFloat32(torch.device("cpu")):
            found = network(state, timestep, **own).sample
        expected = network.float()(state, timestep, **own).sample
    assert torch.equal(found, expected)


@pytest.mark.integration
def test_the_check_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that gives the same weights another meaning is found, though the networks agree."""
    source = pipeline(tmp_path / "unet", plain_unet())
    change, true = {"prediction_type": PredictionType.SAMPLE}, convert.write_records
    monkeypatch.setattr(
        convert,
        "write_records",
        lambda folder, facts, *rest: true(folder, facts.model_copy(update=change), *rest),
    )
    with pytest.raises(HddmError, match="is not the source's"):
        convert.write(plan_conversion(source, Conversion()), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("steps", [2, 20])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_short_schedules_pass_the_check(kind: str, steps: int, tmp_path: Path) -> None:
    """Their last interval is wide, and with zero terminal SNR it is another curve."""
    config = {"num_train_timesteps": steps, "beta_schedule": "squaredcos_cap_v2"}
    for rescaled in (False, True):
        schedule = from_diffusers({**config, "rescale_betas_zero_snr": rescaled})
        expert = _dit_expert(tmp_path / f"{rescaled}", schedule, kind)
        assert (
            convert.write(plan_conversion(expert, Conversion()), tmp_path / f"out-{rescaled}")
            is not None
        )
