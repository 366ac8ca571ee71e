"""How often conversions build a network, which takes time and memory even without its weights."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import ModelMixin

import hddm
from hddm.checkpoints.merging import merge_experts
from hddm.checkpoints.write_back import write_back
from hddm.inspection.folders import inspected
from hddm.networks.families import families
from tests.checkpoint_files import dit, pipeline, text_unet
from tests.flow_models import flow_pipeline, sd3

Build = Callable[[Path], Path]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[ModelMixin]:
    """Networks of all families on the meta device, in the order in which they are built from now on."""
    found: list[ModelMixin] = []
    for family in families().values():
        monkeypatch.setattr(family.network, "__init__", _counted(family.network.__init__, found))
    return found


def _counted(constructor: Callable[..., None], found: list[ModelMixin]) -> Callable[..., None]:
    @functools.wraps(constructor)
    def counted(self: ModelMixin, *args: Any, **keywords: Any) -> None:
        constructor(self, *args, **keywords)
        # Positions that no file holds are computed by a network without layers, which is not empty.
        if next(self.parameters()).is_meta:
            found.append(self)

    return counted


def _of_dit(folder: Path) -> Path:
    return pipeline(folder, dit())


def _of_unet(folder: Path) -> Path:
    return pipeline(folder, text_unet())


def _of_sd3(folder: Path) -> Path:
    return flow_pipeline(folder, sd3())


def _expert(folder: Path) -> Path:
    return hddm.convert(_of_dit(folder / "source"), folder / "expert")


@pytest.mark.parametrize("make", [_of_dit, _of_unet, _of_sd3, _expert])
def test_a_conversion_builds_the_sources_network_and_the_written_one_once_each(
    make: Build, built: list[ModelMixin], tmp_path: Path
) -> None:
    source = make(tmp_path / "source")
    built.clear()
    hddm.convert(source, tmp_path / "out")
    assert len(built) == 2
    # The network that is read back has nothing in common with the source's.
    first, second = built
    assert {one.data_ptr() for one in first.parameters()}.isdisjoint(
        one.data_ptr() for one in second.parameters()
    )


def test_a_conversion_without_its_check_builds_one_network(
    built: list[ModelMixin], tmp_path: Path
) -> None:
    source = _of_unet(tmp_path / "source")
    built.clear()
    hddm.convert(source, tmp_path / "out", verify=False)
    assert len(built) == 1


def test_each_network_is_built_once_to_write_back_merge_and_inspect(
    built: list[ModelMixin], tmp_path: Path
) -> None:
    expert = _expert(tmp_path)
    built.clear()
    write_back(expert, tmp_path / "back", "diffusers-dit")
    assert len(built) == 1
    built.clear()
    merge_experts([expert, expert], tmp_path / "merged")
    assert len(built) == 2
    built.clear()
    inspected(tmp_path / "back")
    assert len(built) == 1
