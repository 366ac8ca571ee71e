"""Training an expert on from the command line, and every init and shard that do not fit."""

from pathlib import Path
from typing import Any

import pytest

from hddm.calibration import FILE_NAME
from hddm.data.partition import partition
from hddm.networks.transformers import ExpertTransformer
from hddm.training.calibrate import recalibrate
from hddm.training.continuation import continue_expert
from hddm.training.expert import new_network
from hddm.utils.errors import HddmError
from tests.artefacts import (
    Command,
    aged,
    contents,
    copied,
    edit_json,
    expert_settings,
    seal,
    write_images,
)

SHAPE = (1, 4, 4)


@pytest.fixture(scope="module")
def continued(shards: Path, ddpm_expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The DDPM expert of shard 0, trained on in shard 1 with flow matching."""
    out = tmp_path_factory.mktemp("continued") / "expert"
    continue_expert(ddpm_expert, shards / "shard_1", out, expert_settings("flow", steps=3))
    return out


def _refused(init: Path, shard: Path, tmp_path: Path, objective: str = "flow", **changes: Any) -> str:
    with pytest.raises(HddmError) as caught:
        continue_expert(init, shard, tmp_path / "out", expert_settings(objective, steps=1, **changes))
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def test_what_does_not_fit_the_init_is_refused(
    shards: Path, whole: Path, class_expert: Path, ddpm_expert: Path, ensemble: Path, tmp_path: Path
) -> None:
    (large,) = partition(write_images(tmp_path / "images", side=6), tmp_path / "large", 1)
    assert "images are (1, 6, 6), the expert's samples (1, 4, 4)" in _refused(ddpm_expert, large, tmp_path)
    assert "an ensemble" in _refused(ensemble, whole, tmp_path)
    assert "no such folder" in _refused(tmp_path / "gone", whole, tmp_path)
    asked = {"class_conditional": True}
    assert f"those of {ddpm_expert} []" in _refused(ddpm_expert, whole, tmp_path, **asked)
    other = copied(class_expert, tmp_path)
    edit_json(other / "expert.json", classes=["cats", "dogs"])
    message = _refused(other, whole, tmp_path, **asked)
    assert "its classes are ['columns', 'rows'], those of" in message
    assert "['cats', 'dogs']" in message


def test_images_without_labels_teach_no_classes(images: Path, class_expert: Path, tmp_path: Path) -> None:
    (flat,) = partition(images / "rows", tmp_path / "flat", 1)
    message = _refused(class_expert, flat, tmp_path, class_conditional=True)
    assert "no labels; drop --class-conditional" in message


def test_an_init_without_a_null_class_needs_classes(whole: Path, class_expert: Path, tmp_path: Path) -> None:
    init = copied(class_expert, tmp_path)
    edit_json(init / "expert.json", null_class=None)
    message = _refused(init, whole, tmp_path)
    assert "no value that stands for no class_labels; pass --class-conditional" in message


def test_an_init_that_needs_a_text_is_refused(whole: Path, text_expert: Path, tmp_path: Path) -> None:
    assert "no value that stands for no encoder_hidden_states" in _refused(text_expert, whole, tmp_path)


@pytest.fixture
def text_expert(flow_expert: Path, tmp_path: Path) -> Path:
    """An expert of prompts, with no embedding that stands for none."""
    folder = copied(flow_expert, tmp_path / "text")
    network = new_network(ExpertTransformer, "tiny", SHAPE, 0, text_dim=8)
    network.save_pretrained(folder)
    edit_json(folder / "expert.json", conditions=["encoder_hidden_states"])
    return folder


def test_ddpm_goes_on_only_where_noise_is_predicted(
    whole: Path, flow_expert: Path, continued: Path, tmp_path: Path
) -> None:
    assert "predicts flow_prediction" in _refused(flow_expert, whole, tmp_path, "ddpm")
    assert "trained on with flow matching" in _refused(continued, whole, tmp_path, "ddpm")


def test_an_init_that_lost_the_calibration_of_its_training_is_refused(
    whole: Path, continued: Path, tmp_path: Path
) -> None:
    init = copied(continued, tmp_path)
    old = aged(copied(continued, tmp_path / "old"))
    for folder in (init, old):
        (folder / FILE_NAME).unlink()
    assert f"{FILE_NAME}: is not there" in _refused(init, whole, tmp_path)
    seal(init)
    assert "and it was trained in it; copy the expert again" in _refused(init, whole, tmp_path)
    assert "its calibration is not there, and expert.json says" in _refused(old, whole, tmp_path)
    edit_json(old / "expert.json", calibration_sha256=None)
    assert "and it was trained in it; copy the expert again" in _refused(old, whole, tmp_path)


def test_the_calibration_of_a_training_is_not_fitted_anew(shards: Path, continued: Path) -> None:
    before = contents(continued)
    for data in (shards / "shard_1", None):
        with pytest.raises(HddmError, match="calibration, which must stay as it is"):
            recalibrate(continued, data, num_images=16, steps=1)
    assert contents(continued) == before


def test_training_on_from_the_command_line(
    shards: Path, ddpm_expert: Path, flow_expert: Path, tmp_path: Path, hddm: Command
) -> None:
    out, done = tmp_path / "on", tmp_path / "samples"
    command = ["train", "expert", shards / "shard_0", "--init", ddpm_expert, "--steps", 2, "--batch-size", 8]
    code, shown, err = hddm(*command, "--objective", "flow", "--out", out)
    assert code == 0, err
    assert f"{out}: trained for 2 steps" in shown
    for arguments in (
        ["inspect", out],
        ["assemble", out, flow_expert, "--strategy", "draw", "--out", tmp_path / "ensemble"],
        ["sample", tmp_path / "ensemble", "--num-images", 3, "--steps", 2, "--out", done],
    ):
        code, _, err = hddm(*arguments)
        assert code == 0, err
    assert len(list(done.glob("*.png"))) == 3
    (tmp_path / "scheduler_config.json").write_text("{}")
    for extra in (["--size", "small"], ["--schedule", tmp_path / "scheduler_config.json"]):
        code, shown, err = hddm(*command, "--objective", "flow", "--out", tmp_path / "no", *extra)
        assert code in (1, 2)
        assert err == f"hddm: {extra[0]}: --init fixes it; drop one of the two\n"
    assert not (tmp_path / "no").exists()
