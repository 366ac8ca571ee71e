"""Training an adapter: what changes, what does not, and what is left on disk."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hddm import load
from hddm.calibration import FILE_NAME as CALIBRATION
from hddm.calibration import Moments
from hddm.data.shards import open_shard
from hddm.experts.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from hddm.experts.records import EXPERT_FILE, read_expert
from hddm.networks.folders import WEIGHTS
from hddm.training.continuation import bounded_gain, continue_expert
from hddm.training.expert import train_expert
from hddm.training.settings import RunOptions
from hddm.training.verify import verify_expert
from hddm.utils.errors import HddmError
from hddm.utils.records import MANIFEST
from hddm.velocity import PredictionType
from tests.artefacts import Died, contents, copied, ending_at, expert_settings, shard_record


@pytest.fixture(scope="module")
def adapter(shards: Path, ddpm_expert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The DDPM expert of shard 0, adapted to shard 1 with flow matching."""
    out = tmp_path_factory.mktemp("adapted") / "expert"
    continue_expert(ddpm_expert, shards / "shard_1", out, expert_settings("flow", lora_rank=2, lora_alpha=4))
    return out


def test_the_folder_holds_the_adapter_and_says_what_it_adapts(
    shards: Path, ddpm_expert: Path, adapter: Path
) -> None:
    assert {path.name for path in adapter.iterdir()} == {
        *(ADAPTER_CONFIG, ADAPTER_WEIGHTS, CALIBRATION, "config.json", EXPERT_FILE, MANIFEST)
    }
    before, facts = (json.loads((folder / EXPERT_FILE).read_text()) for folder in (ddpm_expert, adapter))
    changed = {"objective", "training_calibration", "shard", "adapter", "training"}
    assert {key for key in facts if facts[key] != before[key]} == changed
    assert (facts["objective"], facts["training_calibration"]) == ("flow", True)
    assert facts["shard"] == shard_record(shards / "shard_1")
    sha256 = hashlib.sha256((ddpm_expert / WEIGHTS).read_bytes()).hexdigest()
    assert facts["adapter"]["base_sha256"] == facts["training"]["init_sha256"] == sha256
    assert (facts["adapter"]["rank"], facts["adapter"]["alpha"]) == (2, 4)
    assert (adapter / facts["adapter"]["base"]).resolve() == ddpm_expert.resolve()
    assert json.loads((adapter / ADAPTER_CONFIG).read_text())["lora_alpha"] == 4


def test_only_attention_and_mlps_differ_from_the_base_and_by_the_rank(
    ddpm_expert: Path, adapter: Path
) -> None:
    before, after = (read_expert(folder).network.state_dict() for folder in (ddpm_expert, adapter))
    targets = json.loads((adapter / EXPERT_FILE).read_text())["adapter"]["targets"]
    for name, weight in before.items():
        assert (name in targets) != torch.equal(weight, after[name])
    for name in targets:
        singular = torch.linalg.svdvals((after[name] - before[name]).double())
        assert singular[2] < 1e-6 < singular[0]
    inside = [name for name in before if name.startswith("layers.")]
    assert set(targets) == {
        name
        for name in inside
        if name.endswith(("in_proj_weight", "out_proj.weight", "mlp.0.weight", "mlp.2.weight"))
    }


def test_its_calibration_and_its_first_loss_are_those_of_training_on(
    shards: Path, ddpm_expert: Path, adapter: Path, tmp_path: Path
) -> None:
    """B is zero at first, so the two networks are one."""
    images = open_shard(shards / "shard_1").images
    expected = bounded_gain(PredictionType.EPSILON, 1.0, Moments.of(images))
    assert torch.equal(load(adapter).calibration.weights, expected.weights)
    settings = expert_settings("flow", steps=1)
    (full,) = continue_expert(ddpm_expert, shards / "shard_1", tmp_path / "full", settings)
    adapted = settings.model_copy(update={"lora_rank": 2})
    (low,) = continue_expert(ddpm_expert, shards / "shard_1", tmp_path / "low", adapted)
    assert low == pytest.approx(full, rel=1e-6)


def test_an_adapter_is_judged_with_its_base_wherever_that_is(
    ddpm_expert: Path, adapter: Path, tmp_path: Path
) -> None:
    sha256 = hashlib.sha256((ddpm_expert / WEIGHTS).read_bytes()).hexdigest()
    verdict = verify_expert(adapter)
    assert verdict.base == sha256
    listed = json.loads((adapter / MANIFEST).read_text())["files"]
    assert listed["adapter_model.safetensors"] == verdict.files["adapter_model.safetensors"]
    alone = copied(adapter, tmp_path / "alone")
    (problem, *_) = verify_expert(alone).problems
    assert "base" in problem
    found = verify_expert(alone, bases=[copied(ddpm_expert, tmp_path / "base")])
    assert (found.accepted, found.base) == (True, sha256), found.problems


def test_a_stopped_run_keeps_the_adapter_alone_and_goes_on_exactly(
    shards: Path, ddpm_expert: Path, adapter: Path, tmp_path: Path
) -> None:
    """With activation checkpointing, which changes nothing."""
    settings = expert_settings("flow", lora_rank=2, lora_alpha=4, gradient_checkpointing=True)
    given, run = (ddpm_expert, shards / "shard_1", tmp_path / "out", settings), RunOptions(checkpoint_every=3)
    base = contents(ddpm_expert)
    with pytest.raises(Died):
        continue_expert(*given, on_step=ending_at(4), run=run)
    (weights,) = tmp_path.glob("out.run/checkpoints/*/weights.safetensors")
    assert all(".lora_" in name for name in load_file(weights))
    continue_expert(*given, run=run.model_copy(update={"resume": True}))
    assert contents(ddpm_expert) == base
    straight, resumed = contents(adapter), contents(tmp_path / "out")
    assert straight[ADAPTER_WEIGHTS] == resumed[ADAPTER_WEIGHTS]
    assert straight[CALIBRATION] == resumed[CALIBRATION]


def test_an_adapter_can_be_trained_on_as_a_whole_but_not_adapted(
    shards: Path, adapter: Path, tmp_path: Path
) -> None:
    settings = expert_settings("flow", steps=1, learning_rate=1e-9)
    continue_expert(adapter, shards / "shard_1", tmp_path / "out", settings)
    facts = json.loads((tmp_path / "out" / EXPERT_FILE).read_text())
    sha256 = hashlib.sha256((adapter / ADAPTER_WEIGHTS).read_bytes()).hexdigest()
    assert (facts["adapter"], facts["training"]["init_sha256"]) == (None, sha256)
    merged = read_expert(adapter).network.state_dict()
    for name, weight in load_file(tmp_path / "out" / WEIGHTS).items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(HddmError, match=r"holds no diffusion_pytorch_model.safetensors that could be"):
        continue_expert(adapter, shards / "shard_1", tmp_path / "on", expert_settings("flow", lora_rank=2))


def test_adapting_nothing_or_without_peft_is_refused(
    shards: Path, ddpm_expert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = expert_settings("flow", lora_rank=2)
    with pytest.raises(HddmError, match="`lora_rank` adapts an existing expert; pass `init`"):
        train_expert(shards / "shard_1", tmp_path / "out", settings)
    with pytest.raises(ValueError, match="`compile` does not work with `lora_rank`"):
        expert_settings("flow", lora_rank=2, compile=True)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(HddmError, match=r"pip install '\.\[lora\]' in a checkout"):
        continue_expert(ddpm_expert, shards / "shard_1", tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()
