"""``model_index.json``: classes come from a list, and nothing that a folder says runs code."""

from pathlib import Path

import pytest
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

import hddm
from hddm.experts.ensemble_folders import shift_of, write_model_index, write_scheduler
from hddm.experts.ensemble_records import CLASSES, read_model_index
from tests.artefacts import copied, edit_json, refusal


@pytest.fixture
def folder(ensemble: Path, tmp_path: Path) -> Path:
    """An ensemble to spoil."""
    return copied(ensemble, tmp_path)


def _refusal(folder: Path) -> str:
    (message,) = {refusal(load, folder) for load in (hddm.load, hddm.HDDMPipeline.from_pretrained)}
    assert "\n" not in message
    return message


def test_every_class_of_the_list_is_read_as_written(ensemble: Path, tmp_path: Path) -> None:
    named = {part: name for part, name in read_model_index(ensemble).items() if name}
    assert named == {part: CLASSES[part][0] for part in ("experts", "router", "scheduler")}
    for part, names in CLASSES.items():
        for name in names:
            write_model_index(tmp_path, {part: name})
            assert read_model_index(tmp_path)[part] == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"auto_map": {"a": "code.py"}}, "unknown key 'auto_map' (is {'a': 'code.py'})"),
        ({"custom_pipeline": "evil"}, "unknown key 'custom_pipeline' (is 'evil')"),
        ({"text_encoders": [None, None]}, "did you mean 'text_encoder'?"),
        (
            {"_class_name": ["my_module", "HDDMPipeline"]},
            "_class_name is ['my_module', 'HDDMPipeline']",
        ),
        ({"experts": ["evil", "ExpertSet"]}, "experts is ['evil', 'ExpertSet'], and may"),
        ({"experts": [None, None]}, "experts is [None, None], and may be ['hddm', 'ExpertSet']"),
        ({"router": [[], {}]}, "router is [[], {}]"),
        ({"scheduler": ["os", "system"]}, "scheduler is ['os', 'system']"),
        (
            {"vae": ["diffusers", "AutoencoderDC"]},
            "['diffusers', 'AutoencoderKL'] or ['diffusers', 'Auto",
        ),
    ],
    ids=str,
)
def test_anything_else_is_refused_in_one_line_with_file_key_and_value(
    change: dict[str, object], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_json(folder / "model_index.json", **change)
    (folder / "evil.py").write_text("raise SystemExit('foreign code ran')")
    monkeypatch.syspath_prepend(str(folder))
    said = _refusal(folder)
    assert said.startswith(f"{folder / 'model_index.json'}: ")
    assert message in said


def test_the_scheduler_is_the_one_of_diffusers(tmp_path: Path) -> None:
    write_scheduler(tmp_path, 3.0)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "scheduler")
    assert (scheduler.config.shift, scheduler.config.num_train_timesteps) == (3.0, 1000)
    assert shift_of(scheduler) == 3.0
    for other in (FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True), DDIMScheduler()):
        assert "time grid has the shift alone" in refusal(shift_of, other)
