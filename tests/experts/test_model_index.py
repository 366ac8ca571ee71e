"""``model_index.json``: classes come from a list, and nothing that a folder says runs code."""

from pathlib import Path

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

import hddm
from hddm.experts.ensemble_folders import (
    CLASSES,
    read_model_index,
    read_shift,
    write_model_index,
    write_scheduler,
)
from hddm.utils.errors import HddmError
from tests.artefacts import copied, edit_json


@pytest.fixture
def folder(ensemble: Path, tmp_path: Path) -> Path:
    """An ensemble to spoil."""
    return copied(ensemble, tmp_path)


def _refusal(folder: Path) -> str:
    found = set()
    for load in (hddm.load, hddm.HDDMPipeline.from_pretrained):
        with pytest.raises(HddmError) as caught:
            load(folder)
        found.add(str(caught.value))
    (message,) = found
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
        ({"safety_checker": [None, None]}, "unknown key 'safety_checker'"),
        ({"text_encoders": [None, None]}, "did you mean 'text_encoder'?"),
        ({"_class_name": "StableDiffusionPipeline"}, "_class_name is 'StableDiffusionPipeline', not 'HDDMP"),
        ({"_class_name": ["my_module", "HDDMPipeline"]}, "_class_name is ['my_module', 'HDDMPipeline']"),
        ({"experts": ["evil", "ExpertSet"]}, "experts is ['evil', 'ExpertSet'], and may"),
        ({"experts": [None, None]}, "experts is [None, None], and may be ['hddm', 'ExpertSet']"),
        ({"router": ["hddm", "RouterTransformer", "x"]}, "router is ['hddm', 'RouterTransformer', 'x']"),
        ({"router": [[], {}]}, "router is [[], {}]"),
        ({"router": "hddm"}, "router is 'hddm'"),
        ({"router": [None, None]}, "router is None, and 'router' in ensemble.json"),
        ({"scheduler": ["os", "system"]}, "scheduler is ['os', 'system']"),
        ({"vae": ["diffusers", "AutoencoderDC"]}, "['diffusers', 'AutoencoderKL'] or ['diffusers', 'Auto"),
        ({"text_encoder": ["transformers", "AutoModel"]}, "text_encoder is ['transformers', 'AutoModel']"),
    ],
    ids=str,
)
def test_anything_else_is_refused_in_one_line_with_file_key_and_value(
    change: dict[str, object], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_json(folder / "model_index.json", **change)
    (folder / "evil.py").write_text("raise SystemExit('foreign code ran')")
    monkeypatch.syspath_prepend(str(folder))
    refusal = _refusal(folder)
    assert refusal.startswith(f"{folder / 'model_index.json'}: ")
    assert message in refusal


def test_the_scheduler_is_the_one_of_diffusers(tmp_path: Path) -> None:
    write_scheduler(tmp_path, 3.0)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "scheduler")
    assert (scheduler.config.shift, scheduler.config.num_train_timesteps) == (3.0, 1000)
    assert read_shift(tmp_path) == 3.0
    scheduler.save_pretrained(tmp_path / "again" / "scheduler")
    assert read_shift(tmp_path / "again") == 3.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "no such file"),
        ({"shift": 3.0}, "shift is 3, and 1 in ensemble.json; assemble it anew"),
        ({"shift": -1.0}, "shift is -1.0, and must be a positive number"),
        ({"shift": float("inf")}, "shift is inf"),
        ({"shift": True}, "shift is True"),
        ({"shift": "3"}, "shift is '3'"),
        ({"_class_name": "DDIMScheduler"}, "_class_name is 'DDIMScheduler'"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas is True, and hddm's grid has the shift alone"),
        ({"shfit": 3.0}, "shfit"),
    ],
    ids=str,
)
def test_a_bent_grid_is_refused(change: dict[str, object] | None, message: str, folder: Path) -> None:
    config = folder / "scheduler" / "scheduler_config.json"
    if change is None:
        config.unlink()
    else:
        edit_json(config, **change)
    refusal = _refusal(folder)
    assert str(config) in refusal
    assert message in refusal
