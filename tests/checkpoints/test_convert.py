"""hddm convert on checkpoints with their own tools' outputs, and what it leaves behind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ModelMixin
from safetensors.torch import load_file
from torch import Tensor

import hddm as library
from hddm.checkpoints import convert
from hddm.checkpoints.sources import KeyTable
from hddm.schedules import from_diffusers
from tests.artefacts import Command, contents, edit_json, largest_file
from tests.checkpoint_files import (
    conditions_of,
    converted,
    dit,
    facts_of,
    pipeline,
    pixart,
    plain_unet,
    refused,
    shared_checkpoint,
    text_unet,
    written_back,
)

WEIGHTS = "diffusion_pytorch_model.safetensors"
PICKLED = ("--allow-pickle", "--num-heads", 4)
LAYOUTS = {
    "facebook-dit": PICKLED,
    "pixart-original": PICKLED,
    "diffusers-dit": (),
    "diffusers-pixart": (),
    "diffusers-unet2d": (),
    "diffusers-unet2d-condition": (),
}


@pytest.mark.parametrize(("layout", "options"), LAYOUTS.items(), ids=LAYOUTS)
def test_a_tools_own_outputs_are_reproduced_and_its_file_comes_back(
    hddm: Command, tmp_path: Path, layout: str, options: tuple[object, ...]
) -> None:
    source, expert, back = shared_checkpoint(layout), tmp_path / "expert", tmp_path / "back"
    assert f"layout: {layout}" in converted(hddm, source, expert, *options)
    truth = load_file(source / "reference.safetensors")
    field = library.load(expert)
    given = {name: truth[name] for name in ("class_labels", "encoder_hidden_states") if name in truth}
    velocity = field.velocity(truth["x_t"], truth["t"], **given)
    torch.testing.assert_close(
        velocity, truth["velocity"], rtol=0, atol=1e-4 * truth["velocity"].std().item()
    )
    found, expected = _weights(written_back(hddm, expert, back, layout)), _weights(source)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    converted(hddm, back, tmp_path / "again", *options[1:])
    assert contents(tmp_path / "again")[WEIGHTS] == contents(expert)[WEIGHTS]
    if layout.startswith("diffusers"):
        before, after = (facts_of(tmp_path / name) for name in ("expert", "again"))
        assert all(before[key] == after[key] for key in ("schedule", "prediction_type", "conditions"))


def _weights(folder: Path) -> dict[str, Tensor]:
    (path,) = [
        one
        for one in folder.rglob("*")
        if one.suffix in (".pt", ".pth", ".safetensors") and one.name != "reference.safetensors"
    ]
    if path.suffix == ".safetensors":
        return load_file(path)
    content = torch.load(path, weights_only=True)
    return next(content[key] for key in ("ema", "state_dict") if key in content)


NETWORKS = [dit, pixart, plain_unet, text_unet]


@pytest.mark.parametrize("make", NETWORKS)
@torch.no_grad()
def test_fractions_of_timesteps_reach_networks_in_half_precision(
    hddm: Command, tmp_path: Path, make: Callable[[], ModelMixin]
) -> None:
    source = pipeline(tmp_path / "source", make().bfloat16())
    converted(hddm, source, tmp_path / "expert")
    field = library.load(tmp_path / "expert", dtype=torch.bfloat16)
    assert isinstance(field, library.VelocityField)
    fed: list[tuple[Tensor, Tensor]] = []
    network = field.network

    assert isinstance(network, torch.nn.Module)
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
        assert velocity.dtype == torch.float32
        assert velocity.shape == x.shape
        assert fed[-1][0].dtype == torch.float32
        assert abs(fed[-1][0].item() - wanted) < 1e-2
    assert fed[0][1].shape[1] == channels
    assert not torch.equal(fed[0][1], fed[1][1])


def test_a_dry_run_prints_the_plan_and_writes_nothing(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    before = contents(tmp_path)
    text = converted(hddm, source, tmp_path / "expert", "--dry-run")
    for fact in ("layout: diffusers-dit", "predicts: epsilon", "schedule:", "licence:", "nothing written"):
        assert fact in text
    assert contents(tmp_path) == before
    assert sorted(tmp_path.iterdir()) == [source]


def test_an_existing_folder_is_kept_without_the_option(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    converted(hddm, source, tmp_path / "expert")
    assert "--overwrite" in refused(hddm, source, out=tmp_path / "expert")
    edit_json(source / "scheduler" / "scheduler_config.json", prediction_type="sample")
    converted(hddm, source, tmp_path / "expert", "--overwrite")
    assert facts_of(tmp_path / "expert")["prediction_type"] == "sample"
    before = contents(tmp_path)
    assert hddm("convert", source, "--out", source, "--overwrite")[0] == 1
    assert contents(tmp_path) == before


def test_a_full_disk_leaves_nothing(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    with largest_file(4096):
        refused(hddm, source)


def test_a_check_that_fails_leaves_nothing(
    hddm: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pipeline(tmp_path / "dit", dit())
    true = KeyTable.to_ours

    def swapped(self: KeyTable, weights: dict[str, Tensor], origin: str) -> Any:
        keys = [f"transformer_blocks.{n}.ff.net.2.weight" for n in (0, 1)]
        exchanged = dict(weights) | {keys[0]: weights[keys[1]], keys[1]: weights[keys[0]]}
        return true(self, exchanged, origin)

    monkeypatch.setattr(KeyTable, "to_ours", swapped)
    monkeypatch.setattr(KeyTable, "renamed", lambda self, weights, origin: dict(weights))
    error = refused(hddm, source)
    assert "is not the source's" in error
    assert "nothing was written" in error


def test_an_interruption_leaves_nothing(
    hddm: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pipeline(tmp_path / "dit", dit())

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "_cast_in_use", stop)
    assert hddm("convert", source, "--out", tmp_path / "expert")[0] != 0
    assert list(tmp_path.iterdir()) == [source]


def test_every_fact_of_a_conversion_is_recorded(hddm: Command, tmp_path: Path) -> None:
    source = pipeline(tmp_path / "dit", dit())
    converted(hddm, source, tmp_path / "expert", "--prediction-type", "epsilon")
    facts = facts_of(tmp_path / "expert")
    assert facts["variance_head"]
    assert facts["source"]["layout"] == "diffusers-dit"
    assert facts["source"]["options"]["prediction_type"] == "epsilon"
    assert len(facts["source"]["files"][WEIGHTS]) == 64
    assert facts["schedule_source"].endswith("scheduler_config.json")
    assert facts["sample_shape"] == [4, 8, 8]
    assert (
        json.loads((tmp_path / "expert" / "config.json").read_text())["_class_name"]
        == "DiTTransformer2DModel"
    )
