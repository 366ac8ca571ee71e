"""Some of an ensemble's experts, without the others."""

import shutil
from pathlib import Path

import pytest
import torch

import hddm
from hddm.experts.assembly import assemble
from hddm.experts.assembly_changes import change
from hddm.utils.errors import HddmError
from tests.artefacts import copied


def _states() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.linspace(0.1, 0.9, 5)


@pytest.mark.parametrize("kept", [[0], [1], [1, 0]], ids=str)
def test_a_subset_routes_by_the_posterior_over_the_ones_kept(ensemble: Path, kept: list[int]) -> None:
    whole, some = hddm.load(ensemble), hddm.load(ensemble, experts=kept)
    assert isinstance(whole, hddm.Ensemble)
    assert isinstance(some, hddm.Ensemble)
    assert whole.router is not None
    assert some.router is not None
    x, t = _states()
    shares = whole.router(x, t)[:, kept]
    torch.testing.assert_close(some.router(x, t), shares / shares.sum(1, keepdim=True))
    for index, field in zip(kept, some.experts, strict=True):
        assert torch.equal(field.velocity(x, t), whole.experts[index].velocity(x, t))


def test_a_strategy_of_more_experts_than_are_kept_takes_all_of_them(ensemble: Path, tmp_path: Path) -> None:
    pipeline = hddm.HDDMPipeline.from_pretrained(ensemble)
    pipeline.facts = pipeline.facts.model_copy(update={"strategy": "top-2"})
    pipeline.save_pretrained(tmp_path / "top")
    some = hddm.load(tmp_path / "top", experts=[1])
    assert isinstance(some, hddm.Ensemble)
    assert some.strategy == "top-1"


@pytest.mark.parametrize("kept", [[], [2], [-1], [0, 0]], ids=str)
def test_experts_that_are_not_there_are_refused(ensemble: Path, kept: list[int]) -> None:
    with pytest.raises(HddmError, match=r"choose some of 0 … 1"):
        hddm.load(ensemble, experts=kept)


def test_one_expert_has_no_subset(flow_expert: Path) -> None:
    with pytest.raises(HddmError, match="is one expert"):
        hddm.load(flow_expert, experts=[0])


def test_weights_that_another_folder_has_replaced_are_not_taken_for_the_expert_s(
    ensemble: Path, tmp_path: Path
) -> None:
    changed = copied(ensemble, tmp_path)
    model = hddm.load(changed)
    assert isinstance(model, hddm.Ensemble)
    change(changed, remove=["0"])
    x, t = _states()
    with pytest.raises(HddmError, match="has changed since it was opened"):
        model.experts[0].velocity(x, t)


def test_a_file_with_other_names_keeps_its_mode(flow_expert: Path, tmp_path: Path) -> None:
    expert = copied(flow_expert, tmp_path)
    weights = expert / "diffusion_pytorch_model.safetensors"
    weights.chmod(0o600)
    assemble([expert], tmp_path / "ensemble")
    assert weights.stat().st_nlink == 2
    assert weights.stat().st_mode & 0o777 == 0o600


def test_experts_that_were_not_chosen_need_not_even_be_there(ensemble: Path, tmp_path: Path) -> None:
    partial = copied(ensemble, tmp_path)
    shutil.rmtree(partial / "experts" / "0")
    some, whole = hddm.load(partial, experts=[1]), hddm.load(ensemble)
    assert isinstance(some, hddm.Ensemble)
    assert isinstance(whole, hddm.Ensemble)
    x, t = _states()
    assert torch.equal(some.velocity(x, t, expert=torch.zeros(5)), whole.experts[1].velocity(x, t))
    assert len(hddm.HDDMPipeline.from_pretrained(partial, experts=[1]).experts.facts) == 1


def test_a_subset_without_a_router_is_saved_and_read_again(
    ddpm_expert: Path, flow_expert: Path, tmp_path: Path
) -> None:
    assemble([ddpm_expert, flow_expert], tmp_path / "whole")
    hddm.HDDMPipeline.from_pretrained(tmp_path / "whole", experts=[1]).save_pretrained(tmp_path / "one")
    some = hddm.load(tmp_path / "one")
    assert isinstance(some, hddm.Ensemble)
    assert some.strategy == "draw"
