"""Experts as sources: what they know of themselves survives, and nothing comes to mean something else."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hddm as library
from hddm.checkpoints import convert as conversion
from hddm.checkpoints.plan import Conversion, plan
from hddm.experts.records import EXTRAS_FILE, NULL_FILE, Expert, ExpertRecord, save_expert
from hddm.networks.transformers import ExpertTransformer
from hddm.schedules import CosineSchedule, LinearSchedule, Schedule, from_diffusers
from hddm.utils.errors import HddmError
from hddm.velocity import PredictionType
from tests.artefacts import Command, contents, edit_json, seal
from tests.checkpoint_files import (
    converted,
    dit,
    facts_of,
    pipeline,
    pixart,
    plain_unet,
    randomised,
    refused,
    written_back,
)

LINEAR_BETAS = {
    "_class_name": "DDPMScheduler",
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
}
WEIGHTS = "diffusion_pytorch_model.safetensors"


def _dit_expert(
    folder: Path, schedule: Schedule | None = None, kind: str = "epsilon", **changes: object
) -> Path:
    """An expert with adaLN-Zero, its weights all random."""
    schedule = schedule or from_diffusers(LINEAR_BETAS)
    network = ExpertTransformer(
        sample_size=8,
        in_channels=2,
        hidden_size=16,
        depth=2,
        num_heads=2,
        num_classes=3,
        modulation="zero",
        norm_eps=1e-6,
    )
    facts = ExpertRecord.model_validate(
        {
            "objective": "ddpm",
            "prediction_type": kind,
            "schedule": schedule.config,
            "schedule_source": "the test",
            "time_scale": 1000.0 if schedule.end == 1 else 1.0,
            "sample_shape": (2, 8, 8),
            "conditions": ("class_labels",),
            "classes": ("a", "b", "c"),
            "null_class": 3,
            **changes,
        }
    )
    folder.mkdir()
    save_expert(folder, Expert(randomised(network), facts, None))
    return folder


def test_an_expert_states_its_own_schedule(hddm: Command, tmp_path: Path) -> None:
    """Indices of the file's schedule, fed at the time scale of a continuous one, would be off 1,000-fold."""
    expert = _dit_expert(tmp_path / "expert", CosineSchedule())
    (tmp_path / "betas.json").write_text(json.dumps(LINEAR_BETAS))
    for option in (("--schedule", tmp_path / "betas.json"), ("--prediction-type", "sample")):
        assert "states its own schedule" in refused(hddm, expert, *option)


def test_the_first_source_is_known_after_a_second_conversion(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    converted(hddm, source, tmp_path / "first")
    converted(hddm, tmp_path / "first", tmp_path / "second")
    found = facts_of(tmp_path / "second")["source"]
    assert (found["layout"], found["before"]["layout"]) == ("hddm", "diffusers-dit")
    assert found["before"]["files"] == facts_of(tmp_path / "first")["source"]["files"]


def test_a_scheduler_comes_back_with_its_sampling_keys(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    file = source / "scheduler" / "scheduler_config.json"
    edit_json(file, clip_sample=False, steps_offset=1, timestep_spacing="trailing")
    converted(hddm, source, tmp_path / "expert")
    back = written_back(hddm, tmp_path / "expert", tmp_path / "back", "diffusers-dit")
    back = json.loads((back / "scheduler" / "scheduler_config.json").read_text())
    assert (back["clip_sample"], back["steps_offset"], back["timestep_spacing"]) == (False, 1, "trailing")


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        (CosineSchedule(), "epsilon"),
        (from_diffusers(LINEAR_BETAS), "v_prediction"),
        (LinearSchedule(), "flow_prediction"),
    ],
    ids=["another schedule", "another prediction", "flow"],
)
def test_a_layout_of_one_rule_takes_no_weights_of_another(
    schedule: Schedule, kind: str, hddm: Command, tmp_path: Path
) -> None:
    expert = _dit_expert(tmp_path / "expert", schedule, kind)
    assert "means noise prediction with linear betas" in refused(hddm, expert, "--to-layout", "facebook-dit")


def test_weights_that_follow_the_rule_of_a_layout_may_go_there(hddm: Command, tmp_path: Path) -> None:
    expert = _dit_expert(tmp_path / "expert")
    file = written_back(hddm, expert, tmp_path / "out", "facebook-dit") / "checkpoint.safetensors"
    text = converted(hddm, file, tmp_path / "again", "--num-heads", 2)
    assert "heads: 2, as you said; nothing in the file can confirm it" in text
    first, again = load_file(expert / WEIGHTS), load_file(tmp_path / "again" / WEIGHTS)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_weights_that_need_their_calibration_go_nowhere_without_it(hddm: Command, tmp_path: Path) -> None:
    expert = _dit_expert(tmp_path / "expert", training_calibration=True)
    assert "trained on in its calibration" in refused(hddm, expert, "--to-layout", "facebook-dit")


def test_options_that_change_nothing_are_refused(hddm: Command, tmp_path: Path) -> None:
    expert = _dit_expert(tmp_path / "expert")
    assert "--num-heads" in refused(hddm, expert, "--num-heads", 2)
    assert "--layout facebook-dit" in refused(hddm, expert, "--layout", "facebook-dit")
    assert "--recipe" in refused(hddm, expert, "--to-layout", "facebook-dit", "--recipe", "paper")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [(), ("--architecture", "adaln-single", "--modulation-rank", 4)], ids=["exact", "fold"]
)
def test_a_dit_in_half_precision_is_converted_and_stays_in_it(
    options: tuple[object, ...], dtype: torch.dtype, hddm: Command, tmp_path: Path
) -> None:
    expert = _dit_expert(tmp_path / "expert")
    file = written_back(hddm, expert, tmp_path / "file", "facebook-dit") / "checkpoint.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    converted(hddm, file, tmp_path / "half", "--num-heads", 2, *options)
    assert {tensor.dtype for tensor in load_file(tmp_path / "half" / WEIGHTS).values()} == {dtype}
    field = library.load(tmp_path / "half")
    x = torch.randn(2, 2, 8, 8)
    assert field.velocity(x, torch.tensor(0.5)).isfinite().all()


def test_the_check_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that gives the same weights another meaning is found, though the networks agree."""
    source = pipeline(tmp_path / "unet", plain_unet())
    planned = plan(source, Conversion())
    write_records = conversion.write_records
    monkeypatch.setattr(
        conversion,
        "write_records",
        lambda folder, facts, nulls: write_records(
            folder, facts.model_copy(update={"prediction_type": PredictionType.SAMPLE}), nulls
        ),
    )
    before = contents(tmp_path)
    with pytest.raises(HddmError, match="is not the source's"):
        conversion.write(planned, tmp_path / "out")
    assert contents(tmp_path) == before


def test_a_fold_that_keeps_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expert = _dit_expert(tmp_path / "expert")
    planned = plan(expert, Conversion(architecture="adaln-single"))
    monkeypatch.setattr(conversion, "LARGEST_FOLD_ERROR", 1e-6)
    with pytest.raises(HddmError, match="raise --modulation-rank"):
        conversion.write(planned, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("steps", [2, 4, 10, 20])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_short_schedules_pass_the_check(kind: str, steps: int, tmp_path: Path) -> None:
    """Their last interval is wide, and with zero terminal SNR it is another curve."""
    config = {
        "_class_name": "DDIMScheduler",
        "num_train_timesteps": steps,
        "beta_schedule": "squaredcos_cap_v2",
    }
    for rescaled in (False, True):
        schedule = from_diffusers({**config, "rescale_betas_zero_snr": rescaled})
        expert = _dit_expert(tmp_path / f"{rescaled}", schedule, kind)
        assert conversion.write(plan(expert, Conversion()), tmp_path / f"out-{rescaled}") is not None


def test_null_text_survives_a_second_conversion(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "pixart", pixart())
    converted(hddm, source, tmp_path / "first")
    save_file(
        {"encoder_hidden_states": torch.ones(3, 12)}, tmp_path / "first" / "null_conditions.safetensors"
    )
    seal(tmp_path / "first")
    converted(hddm, tmp_path / "first", tmp_path / "second")
    kept = load_file(tmp_path / "second" / "null_conditions.safetensors")
    assert torch.equal(kept["encoder_hidden_states"], torch.ones(3, 12))


def test_only_an_expert_is_written_back_and_only_where_it_fits(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    assert "convert it first" in refused(hddm, source, "--to-layout", "diffusers-dit")
    converted(hddm, source, tmp_path / "expert")
    message = refused(hddm, tmp_path / "expert", "--to-layout", "facebook-dit")
    assert "it can go to diffusers-dit" in message


@pytest.mark.parametrize("name", [NULL_FILE, EXTRAS_FILE])
@pytest.mark.parametrize("content", [b"", b"not tensors at all", bytes(64)], ids=["empty", "text", "zeros"])
def test_a_spoilt_side_file_is_named_on_the_way_back(
    hddm: Command, tmp_path: Path, name: str, content: bytes
) -> None:
    expert = _dit_expert(tmp_path / "expert")
    (expert / name).write_bytes(content)
    assert name in hddm("convert", expert, "--out", tmp_path / "out", "--to-layout", "facebook-dit")[2]
    seal(expert)
    assert str(expert / name) in refused(hddm, expert, "--to-layout", "facebook-dit")
