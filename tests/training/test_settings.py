"""Run files: known keys only, overridden by the command line, read as they are meant."""

import json
from pathlib import Path

import pytest

from hddm.training.settings import ExpertSettings, RouterSettings, RunOptions, settings_of
from hddm.utils.errors import HddmError
from tests.artefacts import Command

BASE = {"objective": "flow", "steps": 5}


def _file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte: 1e-3", "unknown key 'learning_rte'; did you mean 'learning_rate'?"),
        ("Steps: 3", "unknown key 'Steps'; did you mean 'steps'?"),
        ("learning_rate: fast", r"key 'learning_rate' \(is 'fast'\)"),
        ("batch_size: 0", "key 'batch_size'"),
        ("noise_range: 1:0.5", r"key 'noise_range' \(is '1:0.5'\): must be LOW:HIGH, with 0 <= LOW < HIGH"),
        ("noise_range: [0, .nan]", "key 'noise_range'"),
        ("batch_size: 8\nbatch_size: 9", "key 'batch_size' twice"),
        ("resume: true", "unknown key 'resume'"),
        ("- steps", "holds no settings"),
        ("size: tiny\nsteps: [", r"is not YAML \(line 2, column 9: while parsing a flow node, expected"),
        ("size: \0", "is not YAML"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_what_a_file_should_not_say_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(HddmError, match=rf"^{path}: .*{message}") as error:
        settings_of(ExpertSettings, path, BASE)
    assert "\n" not in str(error.value)
    with pytest.raises(HddmError, match=r"none\.yaml: no such file"):
        settings_of(ExpertSettings, tmp_path / "none.yaml", BASE)


def test_values_are_what_they_are_meant_to_be(tmp_path: Path) -> None:
    """YAML itself takes 1e-4 for a word and no for false."""
    lines = ["size: S/2", "learning_rate: 1e-4", "mixed_precision: no", "random_flip: yes", "# done", ""]
    lines.append("noise_range: 0.5:1")
    expected = BASE | {"size": "S/2", "learning_rate": 1e-4, "mixed_precision": "no", "random_flip": True}
    expected["noise_range"] = [0.5, 1]
    for end in ("\n", "\r\n"):
        found = settings_of(ExpertSettings, _file(tmp_path, end.join(lines)), BASE)
        assert found == ExpertSettings.model_validate(expected)
    assert settings_of(ExpertSettings, _file(tmp_path, ""), BASE).steps == 5


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    path = _file(tmp_path, "steps: 7\nbatch_size: 16\nwarmup: 3")
    found = settings_of(ExpertSettings, path, {"objective": "flow", "seed": 4})
    assert (found.steps, found.batch_size, found.warmup, found.seed) == (7, 16, 3, 4)
    assert settings_of(ExpertSettings, path, BASE | {"steps": 9}).steps == 9


def test_a_bad_value_on_the_command_line_is_not_reported_as_the_files(tmp_path: Path) -> None:
    path = _file(tmp_path, "batch_size: 16")
    for given in ({"objective": "flow", "steps": 0}, {"objective": "flw", "steps": 1}, BASE | {"seed": -1}):
        with pytest.raises(HddmError, match=r"^`(steps` 0|objective` flw|seed` -1): "):
            settings_of(ExpertSettings, path, given)


@pytest.mark.parametrize("value", [{"learning_rate": "inf"}, {"lora_rank": 2, "lora_alpha": "inf"}])
def test_rates_and_scales_are_finite(value: dict[str, object]) -> None:
    with pytest.raises(HddmError, match=r"^`(learning_rate|lora_alpha)` inf: "):
        settings_of(ExpertSettings, None, BASE | value)


def test_one_file_serves_experts_routers_and_how_runs_are_kept(tmp_path: Path) -> None:
    path = _file(tmp_path, "steps: 7\nsnr_gamma: 5\ncalibrate: true\ncheckpoint_every: 3")
    assert settings_of(RouterSettings, path, {}).calibrate
    assert settings_of(ExpertSettings, path, {"objective": "ddpm"}).snr_gamma == 5
    assert settings_of(RunOptions, path, {"resume": True}).checkpoint_every == 3


def test_a_run_records_what_file_and_command_line_came_to(whole: Path, tmp_path: Path, hddm: Command) -> None:
    """What is required may stand in either place."""
    path, out = _file(tmp_path, "steps: 3\nsize: tiny\nbatch_size: 8\ncheckpoint_every: 2"), tmp_path / "out"
    code, _, error = hddm("train", "expert", whole, "--out", out, "--config", path)
    assert code == 2
    assert "--objective is required, here or in --config" in " ".join(error.split())
    command = ("train", "expert", whole, "--out", out, "--config", path, "--objective", "flow")
    code, _, error = hddm(*command, "--steps", 4)
    assert code == 0, error
    record = json.loads((tmp_path / "out.run" / "run.json").read_text())
    assert record["settings"].items() >= {"steps": 4, "size": "tiny", "batch_size": 8}.items()
    steps = sorted(p.name for p in (tmp_path / "out.run" / "checkpoints").iterdir())
    assert steps == ["step_00000002", "step_00000004"]
