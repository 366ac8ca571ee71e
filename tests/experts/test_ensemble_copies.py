"""Copies of ensembles: the same images, and nothing that one does reaches the other."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hddm
from hddm.ensemble import Ensemble
from hddm.networks.offload import Offload, StoredNetwork
from hddm.utils.errors import HddmError
from tests.ensemble_files import flow_expert, load_ensemble, write_ensemble


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ensemble(tmp_path_factory.mktemp("copies"), [flow_expert(seed) for seed in range(3)])


def _networks(model: Ensemble) -> list[StoredNetwork]:
    return [field.network for field in model.experts]  # type: ignore[misc]


def _sampled(model: Ensemble, seed: int = 1) -> Tensor:
    return hddm.sample(model, 4, seed, steps=3, strategy="full")


@pytest.mark.parametrize("has_run", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("mode", ["none", "ram", "disk"])
def test_a_copy_samples_as_its_original_does(folder: Path, mode: Offload, has_run: bool) -> None:
    plain, model = _sampled(load_ensemble(folder)), load_ensemble(folder, offload=mode)
    if has_run:
        assert torch.equal(_sampled(model), plain)
    copied = copy.deepcopy(model)
    for one in (copied, model, copied):
        assert torch.equal(_sampled(one), plain)
    shelf = _networks(copied)[0].shelf
    assert {network.shelf for network in _networks(copied)} == {shelf}
    assert shelf is not _networks(model)[0].shelf
    assert shelf.budget == _networks(model)[0].shelf.budget


@pytest.mark.parametrize("mode", ["none", "ram", "disk"])
def test_what_is_done_to_a_copy_is_not_done_to_its_original(folder: Path, mode: Offload) -> None:
    model = load_ensemble(folder, offload=mode)
    plain = _sampled(model)
    copied = copy.deepcopy(model)
    for network in _networks(copied):
        network.shelf.bring(network)
        for parameter in network.network.parameters():
            parameter.data.zero_()
    assert torch.equal(_sampled(model), plain)
    for network in _networks(copied):
        network.to(torch.float64)
    assert _sampled(copied).dtype == torch.float64
    assert torch.equal(_sampled(model), plain)
    copied.strategy, model.strategy = "full", "top-1"
    with pytest.raises(HddmError, match="unknown strategy"):
        copied.strategy = "none"
    assert (copied.strategy, model.strategy) == ("full", "top-1")
