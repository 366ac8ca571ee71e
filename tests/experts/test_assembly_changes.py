"""Changing an ensemble: what is left is what would have been assembled, and no folder is half-changed."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.experts.assembly import assemble, change
from hddm.experts.record_folders import read_router, save_router
from hddm.experts.records import EXPERT_FILE
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.errors import HddmError
from hddm.utils.records import WEIGHTS
from tests.artefacts import Command, contents, edit_json, largest_file, refusal, variant
from tests.conftest import Trio
from tests.ensemble_files import derived, edit_members, load_ensemble, random_router

X = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))
TIMES = torch.tensor([0.02, 0.3, 0.6, 0.9, 1.0])


@pytest.fixture
def whole(trio: Trio, tmp_path: Path) -> Path:
    """An ensemble of all three, to be changed."""
    assemble(trio.experts, tmp_path / "whole", trio.router, strategy="full")
    return tmp_path / "whole"


@torch.no_grad()
def test_removing_an_expert_equals_assembling_without_it(
    trio: Trio, whole: Path, tmp_path: Path
) -> None:
    before = load_ensemble(whole)
    of_all = before.router(X, TIMES)[:, [0, 2]]
    labels = {"class_labels": torch.tensor([0, 1, 0, 1, 2])}
    parts = torch.stack([before.experts[k].velocity(X, TIMES, **labels) for k in (0, 2)], 1)
    change(whole, remove=[1])
    assemble([trio.experts[0], trio.experts[2]], tmp_path / "two", trio.router, strategy="full")
    assert contents(whole) == contents(tmp_path / "two")
    after = load_ensemble(whole)
    torch.testing.assert_close(after.router(X, TIMES), of_all / of_all.sum(1, keepdim=True))
    # Of a class, experts have p(k | x_t) p(k | class) / p(k); the label 2 stands for none.
    facts = derived(whole)
    of_class = torch.tensor([*facts.class_prior, facts.prior])[labels["class_labels"]]
    weights = of_all * of_class / torch.tensor(facts.prior)
    expected = ((weights / weights.sum(1, keepdim=True))[..., None, None, None] * parts).sum(1)
    torch.testing.assert_close(after.velocity(X, TIMES, **labels), expected)


def test_experts_that_go_and_come_keep_their_router_outputs(
    trio: Trio, whole: Path, tmp_path: Path
) -> None:
    """What comes back is found by its shard."""
    change(whole, remove=[0])
    change(whole, remove=["0"])
    assert derived(whole).outputs == (2,)
    assert change(whole, add=trio.experts[:2]) == ()
    assert derived(whole).outputs == (2, 0, 1)
    assemble([trio.experts[k] for k in (2, 0, 1)], tmp_path / "same", trio.router, strategy="full")
    assert contents(whole) == contents(tmp_path / "same")


def test_experts_without_a_shard_record_keep_their_outputs(trio: Trio, whole: Path) -> None:
    for k in range(3):
        edit_json(whole / "experts" / str(k) / EXPERT_FILE, shard=None)
    edit_members(whole, share=[0.5, 0.3, 0.2], output=[0, 1, 2])
    change(whole, remove=[0])
    facts = derived(whole)
    assert facts.outputs == (1, 2)
    assert facts.prior == pytest.approx([0.6, 0.4])
    edit_members(whole, share=[None, None])
    lost = variant(trio.experts[0], whole.parent / "lost", shard=None)
    told = (
        f"the router does not know the shard of {lost} and is left out; the experts' moments route"
    )
    assert told in change(whole, add=[lost])
    assert (derived(whole).router, (whole / "router").is_dir()) == ("moments", False)


def test_an_expert_of_an_unknown_shard_needs_another_router(
    trio: Trio, whole: Path, tmp_path: Path
) -> None:
    change(whole, remove=[2])
    network, record = random_router(2, (1, 4, 4))
    hashes = read_router(trio.router)[1].shard_hashes[:2]
    (tmp_path / "narrow").mkdir()
    save_router(tmp_path / "narrow", network, record.model_copy(update={"shard_hashes": hashes}))
    change(whole, router=tmp_path / "narrow")
    bare = shutil.copytree(trio.experts[2], tmp_path / "bare")
    (bare / CALIBRATION).unlink()
    before = contents(whole)
    with pytest.raises(HddmError) as caught:
        # Without a calibration there are no moments to route by.
        change(whole, add=[bare], strategy="top-1")
    (line,) = caught.value.details
    assert line.startswith(f"{bare}: was trained on a shard that {whole / 'router'} does not know")
    assert line.endswith("train a router on all shards and pass it with `router`")
    assert contents(whole) == before
    change(whole, add=[trio.experts[2]], router=trio.router)
    assert derived(whole).outputs == (0, 1, 2)
    assert len(load_ensemble(whole).experts) == 3


def test_two_experts_never_get_one_output_of_the_router(trio: Trio, tmp_path: Path) -> None:
    """What records no shard was placed by order, so a shard that comes may be the one it was trained on."""
    lost, whole = variant(trio.experts[1], tmp_path / "lost", shard=None), tmp_path / "whole"
    assemble([trio.experts[0], lost, trio.experts[2]], whole, trio.router, strategy="full")
    before = contents(whole)
    with pytest.raises(HddmError) as caught:
        change(whole, add=[trio.experts[1]])
    assert caught.value.details == (
        f"{trio.experts[1]}: takes output 1 of the router, and so does {whole / 'experts/1'}",
    )
    assert contents(whole) == before
    change(whole, remove=[1], add=[trio.experts[1]])
    assert derived(whole).outputs == (0, 2, 1)


def test_strategy_shift_and_papers_stay(trio: Trio, whole: Path) -> None:
    (whole / "notes").mkdir()
    (whole / "notes" / "a.txt").write_text("mine")
    edit_json(whole / "ensemble.json", shift=2.0, strategy="nucleus-0.9")
    change(whole, remove=[0])
    facts = derived(whole)
    assert (facts.shift, facts.strategy) == (2.0, "nucleus-0.9")
    assert (whole / "notes" / "a.txt").read_text() == "mine"


def test_experts_keep_their_names(trio: Trio, tmp_path: Path, hddm: Command) -> None:
    """Wherever they go: into another place, another ensemble, and a copy by the pipeline."""
    mine, other, theirs = (
        variant(folder, tmp_path / name)
        for folder, name in zip(trio.experts, ("mine", "7", "theirs"), strict=True)
    )
    three, two = tmp_path / "three", tmp_path / "two"
    assemble([mine, other, theirs], three)
    assert derived(three).names == ("mine", "7", "theirs")
    code, out, _ = hddm("assemble", three, "--remove", "mine", "--share", "theirs=0.25")
    assert code == 0
    assert "note: removed experts/0 (mine)\n" in out
    assert "\nshares: experts/0 (7) 0.75, experts/1 (theirs) 0.25\n" in out
    HDDMPipeline.from_pretrained(three, experts=[1]).save_pretrained(tmp_path / "one")
    assert derived(tmp_path / "one").names == ("theirs",)
    assemble([three / "experts/1", mine], two)
    assert derived(two).names == ("theirs", "mine")
    # What a new expert has in common with an old one does not name one of them.
    with pytest.raises(
        HddmError, match=r"`share` theirs: names 2 experts; .*two/experts/0 \(theirs\), "
    ):
        change(two, add=[variant(other, tmp_path / "new" / "theirs")], share={"theirs": 0.5})
    # A number is an index, and no name.
    assert "`remove` 7: names no expert" in refusal(change, three, remove=["7"])


def test_a_new_folder_leaves_the_old_one_alone(whole: Path, tmp_path: Path) -> None:
    before = contents(whole)
    change(whole, remove=[0], out=tmp_path / "new")
    assert contents(whole) == before
    assert len(derived(tmp_path / "new").names) == 2
    assert "overwrite=True" in refusal(change, whole, remove=[1], out=tmp_path / "new")
    change(whole, remove=[0, 1], out=tmp_path / "new", overwrite=True)
    assert len(derived(tmp_path / "new").names) == 1
    assert (whole / "experts/2" / WEIGHTS).samefile(tmp_path / "new" / "experts/0" / WEIGHTS)


def test_what_a_link_leads_to_does_not_become_part_of_it(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (whole / "notes").mkdir()
    (whole / "notes" / "link").symlink_to(tmp_path / "private")
    before = sorted(whole.rglob("*"))
    with pytest.raises(HddmError, match=r"notes/link: is a link to .*private, outside the folder"):
        change(whole, remove=[0])
    assert sorted(whole.rglob("*")) == before


def test_what_a_killed_process_left_in_a_folder_does_not_come_along(whole: Path) -> None:
    for name in (".new.part-12", ".new.old-7"):
        (whole / name).mkdir()
        (whole / name / "file").write_bytes(b"half")
    (whole / ".gitattributes").write_text("mine")
    (whole / "empty").mkdir()
    (whole / "notes").mkdir()
    # As in a hub's cache: a link by a path from where it lies.
    (whole / "notes" / "LICENSE").symlink_to("../.gitattributes")
    mode = whole.stat().st_mode
    change(whole, remove=[0])
    names = {path.name for path in whole.iterdir()}
    assert {".gitattributes", "empty"} <= names
    assert (whole / "notes" / "LICENSE").read_text() == "mine"
    assert whole.stat().st_mode == mode
    assert not {".new.part-12", ".new.old-7"} & names


def test_a_change_that_fails_midway_changes_nothing(whole: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    with (
        largest_file(20),
        pytest.raises(HddmError, match=r"whole: cannot be written \(File too large\)"),
    ):
        change(whole, remove=[0])
    assert contents(tmp_path) == before


def test_a_change_puts_back_what_a_killed_one_had_renamed_away(whole: Path) -> None:
    before = contents(whole)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    whole.rename(whole.parent / f".whole.old-{child}")
    assert "names no expert" in refusal(change, whole, remove=[7])
    assert contents(whole.parent) == {f"whole/{name}": value for name, value in before.items()}


def test_a_change_that_cannot_be_is_refused(whole: Path) -> None:
    before = contents(whole.parent)
    for arguments, message in (
        (
            {"remove": [3]},
            "`remove` 3: names no expert; choose one of .*/experts/0 .e0., .*/experts/1 ",
        ),
        ({"remove": ["-1"]}, "`remove` -1: names no expert"),
        ({"remove": [0, 1, 2]}, "no expert is left"),
        ({"remove": [0, 1], "strategy": "top-2"}, "top-2 needs 2 experts and there are 1"),
    ):
        assert re.search(message, refusal(change, whole, **arguments))
    assert contents(whole.parent) == before
