"""Ensemble folders: parts that fit, self-contained, and never half-written."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import hddm
from hddm.ensemble import Ensemble
from hddm.experts.assembly import assemble
from hddm.experts.ensemble_records import name_of
from hddm.experts.record_folders import read_router
from hddm.experts.records import EXPERT_FILE
from hddm.routers import Router
from hddm.utils.errors import HddmError
from hddm.utils.records import WEIGHTS
from tests.artefacts import contents, copied, edit_json, into_hub_cache, refusal
from tests.conftest import Trio
from tests.ensemble_files import load_ensemble

TIMES = torch.tensor([0.03, 0.5, 0.97, 1.0])
X = torch.randn(4, 1, 4, 4, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_a_loaded_ensemble_has_the_velocity_of_its_parts(
    ensemble: Path, ddpm_expert: Path, flow_expert: Path, router: Path
) -> None:
    network, facts = read_router(router)
    fields = [hddm.load(folder) for folder in (ddpm_expert, flow_expert)]
    together = load_ensemble(ensemble)
    assert (together.strategy, together.prior.tolist()) == ("nucleus-0.9", [0.5, 0.5])
    for strategy in ("nucleus-0.9", "full", "top-1", "threshold-0.5"):
        together.strategy = strategy
        apart = Ensemble(fields, Router(network, facts.time_scale), strategy)
        assert torch.equal(together.velocity(X, TIMES), apart.velocity(X, TIMES))


def test_an_ensemble_outlives_the_folders_that_it_was_made_from(
    ensemble: Path, tmp_path: Path
) -> None:
    parts = [copied(ensemble / "experts" / k, tmp_path) for k in "01"]
    router = copied(ensemble / "router", tmp_path)
    assemble(parts, tmp_path / "new", router)
    before = hddm.sample(hddm.load(tmp_path / "new"), 4, steps=3)
    for folder in (*parts, router):
        shutil.rmtree(folder)
    shutil.move(tmp_path / "new", tmp_path / "moved")
    assert torch.equal(hddm.sample(hddm.load(tmp_path / "moved"), 4, steps=3), before)


def test_an_ensemble_is_replaced_only_when_asked(
    ddpm_expert: Path, ensemble: Path, tmp_path: Path
) -> None:
    out = copied(ensemble, tmp_path)
    before = contents(out)
    assert "overwrite=True" in refusal(assemble, [ddpm_expert], out)
    assert contents(out) == before
    assemble([ddpm_expert], out, overwrite=True)
    assert not (out / "experts" / "1").exists()
    assert json.loads((out / "ensemble.json").read_text())["experts"] == [
        {"folder": "experts/0", "name": "ddpm"}
    ]


@pytest.mark.parametrize("key", ["experts", "router"])
@pytest.mark.parametrize("way", ["absolute", "..", "link", "link of a file"])
def test_a_way_out_of_the_ensemble_is_refused_before_anything_is_opened(
    way: str, key: str, ensemble: Path, flow_expert: Path, router: Path, tmp_path: Path
) -> None:
    """What lies at its end would load: nothing but the way there is wrong."""
    folder, outside = copied(ensemble, tmp_path), tmp_path / "outside"
    shutil.copytree(router if key == "router" else flow_expert, outside)
    part = "router" if key == "router" else "experts/1"
    if way == "link":
        shutil.rmtree(folder / part)
        (folder / part).symlink_to(outside)
    elif way == "link of a file":
        (folder / part / WEIGHTS).unlink()
        (folder / part / WEIGHTS).symlink_to(outside / WEIGHTS)
    else:
        part = str(outside) if way == "absolute" else "../outside"
        members = [{"folder": "experts/0"}, {"folder": part}]
        edit_json(folder / "ensemble.json", **{key: part if key == "router" else members})
    (folder / "experts" / "0" / EXPERT_FILE).write_text("spoilt")
    with pytest.raises(HddmError, match="outside the folder") as caught:
        hddm.load(folder)
    assert str(caught.value).startswith(f"{folder / 'ensemble.json'}: names {part!r}")


def test_a_link_inside_the_enclosing_hub_cache_is_followed(ensemble: Path, tmp_path: Path) -> None:
    snapshot = into_hub_cache(copied(ensemble, tmp_path), tmp_path / "models--me--mine")
    found, expected = (
        hddm.sample(hddm.load(folder), 2, steps=2) for folder in (snapshot, ensemble)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategie": "full"}, "unknown key 'strategie'; did you mean 'strategy'?"),
        ({"format": "3.0"}, "format 3.0 is newer"),
        (
            {"format": "1.5"},
            "format 1.5 is no longer read; assemble it anew from its parts: hddm a",
        ),
        ({"strategy": "top-3"}, "top-3 needs 3 experts"),
        (
            {"experts": [{"folder": "experts/0"}, {"folder": "experts/2"}]},
            "there is no such folder",
        ),
        ({"experts": [{"folder": "experts/0", "share": -0.5}]}, "key 'experts.0.share'"),
    ],
    ids=str,
)
def test_an_ensemble_that_is_not_understood_is_refused_in_one_line(
    change: dict[str, object], message: str, ensemble: Path, tmp_path: Path
) -> None:
    folder = copied(ensemble, tmp_path)
    edit_json(folder / "ensemble.json", **change)
    assert message in refusal(hddm.load, folder)


def test_a_strategy_of_more_experts_than_are_kept_takes_all_of_them(
    ensemble: Path, tmp_path: Path
) -> None:
    pipeline = hddm.HDDMPipeline.from_pretrained(ensemble)
    pipeline.ensemble.strategy = "top-2"
    pipeline.save_pretrained(tmp_path / "top")
    assert load_ensemble(tmp_path / "top", experts=[1]).strategy == "top-1"


def test_the_parts_of_an_older_ensemble_are_assembled_anew(ensemble: Path, tmp_path: Path) -> None:
    older = copied(ensemble, tmp_path)
    edit_json(
        older / "ensemble.json", format="1.5", experts=["experts/0", "experts/1"], prior=[0.5, 0.5]
    )
    assert "assemble it anew from its parts" in refusal(hddm.load, older)
    assemble(
        [older / "experts" / k for k in "01"],
        tmp_path / "anew",
        older / "router",
        strategy="nucleus-0.9",
    )
    found, expected = (
        hddm.sample(hddm.load(one), 3, steps=2) for one in (tmp_path / "anew", ensemble)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("version", "is_refused"), [("10.0", True), ("1.9", False)])
def test_an_expert_in_an_ensemble_of_a_newer_format_is_refused_and_of_an_older_one_stands_alone(
    version: str, is_refused: bool, trio: Trio, tmp_path: Path
) -> None:
    assemble(trio.experts, tmp_path / "ensemble")
    edit_json(tmp_path / "ensemble" / "ensemble.json", format=version)
    expert = tmp_path / "ensemble" / "experts" / "0"
    if is_refused:
        assert "10.0" in refusal(name_of, expert)
    else:
        assert name_of(expert) == "0"
