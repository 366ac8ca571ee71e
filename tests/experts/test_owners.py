"""Experts of different owners in one folder: other partitions, class lists and numberings, or no shard."""

import hashlib
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

import hddm
from hddm.calibration_records import FILE_NAME as CALIBRATION
from hddm.data.shard_records import overlap, sketch_of
from hddm.experts.assembly import assemble, change
from hddm.experts.decisions import read_classes
from hddm.experts.ensemble_records import MOMENTS_EVIDENCE
from hddm.networks.transformers import ExpertTransformer
from hddm.routers import MomentsRouter
from hddm.utils.errors import HddmError
from hddm.utils.records import write_manifest
from tests.artefacts import Command, contents, edit_json, refusal, variant
from tests.checkpoint_files import randomised, record_of
from tests.conftest import Trio
from tests.ensemble_files import FLOW, derived, load_ensemble


def _owned(trio: Trio, k: int, folder: Path, hash_: str, **changes: Any) -> Path:
    """Expert k of the trio as of a partition of its own."""
    shard = record_of(trio.experts[k])["shard"] | {
        "partition": hash_ * 64,
        "hash": hash_ * 64,
        "num_shards": 1,
    }
    return variant(trio.experts[k], folder, shard=shard | changes.pop("shard", {}), **changes)


@pytest.fixture
def ours(trio: Trio, tmp_path: Path) -> Path:
    """Of "columns" and "rows", in this order: 12 images, 9 of them columns."""
    return _owned(trio, 0, tmp_path / "ours", "a", shard={"images": 12, "class_images": [9, 3]})


@pytest.fixture
def theirs(trio: Trio, tmp_path: Path) -> Path:
    """Of "dots" and "columns": 36 images, 30 of them dots."""
    return _owned(
        trio,
        1,
        tmp_path / "theirs",
        "b",
        classes=["dots", "columns"],
        shard={"images": 36, "class_images": [30, 6]},
    )


def test_classes_are_joined_by_name_and_each_expert_is_asked_in_its_numbering(
    ours: Path, theirs: Path, tmp_path: Path
) -> None:
    assert assemble([ours, theirs], tmp_path / "both") == ()
    facts = derived(tmp_path / "both")
    assert facts.classes == ("columns", "rows", "dots")
    assert facts.prior == pytest.approx((0.25, 0.75))
    # Of the 15 columns 9 are ours; rows are ours alone, and dots theirs.
    assert torch.allclose(
        torch.tensor(facts.class_prior), torch.tensor([[0.6, 0.4], [1, 0], [0, 1]])
    )
    ensemble = load_ensemble(tmp_path / "both")
    assert ensemble.classes == facts.classes
    mine, other = hddm.load(ours), hddm.load(theirs)
    x, t = (
        torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0)),
        torch.full((3,), 0.5),
    )
    found = ensemble.velocity(
        x, t, expert=torch.tensor([0, 1, 1]), class_labels=torch.tensor([1, 0, 2])
    )
    assert torch.equal(found[:1], mine.velocity(x[:1], t[:1], class_labels=torch.tensor([1])))
    assert torch.equal(found[1:], other.velocity(x[1:], t[1:], class_labels=torch.tensor([1, 0])))


def _unconditional(expert: Path) -> Path:
    """The folder, of a network that takes no classes."""
    randomised(ExpertTransformer(**FLOW | {"in_channels": 1}), 0).save_pretrained(expert)
    (expert / CALIBRATION).unlink()
    edit_json(expert / "expert.json", classes=[], null_class=None, conditions=[])
    return expert


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"nobody": 0.5}, "`share` nobody: names no expert; choose one of "),
        ({"ours": float("nan")}, "`share` nan: must be "),
        ({"ours": 0.4, "theirs": 0.4}, "the shares of all experts sum to 0.8; they must sum to 1"),
        ({"ours": 0.5, "0": 0.2}, "ours is named twice; name it once"),
        ({"ours": 1.0}, "the shares sum to 1 and leave nothing for "),
    ],
    ids=str,
)
def test_shares_that_do_not_fit_are_refused(
    shares: dict[str, float], words: str, ours: Path, theirs: Path, tmp_path: Path
) -> None:
    message = refusal(assemble, [ours, theirs], tmp_path / "both", share=shares)
    assert words in message
    assert not (tmp_path / "both").exists()


def test_two_experts_of_one_shard_divide_it_by_their_shares(trio: Trio, tmp_path: Path) -> None:
    """The router's probability of their shard is theirs together."""
    twin = variant(trio.experts[2], tmp_path / "twin", shard=record_of(trio.experts[0])["shard"])
    experts = [*trio.experts, twin]
    assert "leave one out, or divide it by `share`" in refusal(assemble, experts, tmp_path / "no")
    message = refusal(assemble, experts, tmp_path / "no", share={"twin": 0.1})
    assert message.endswith(f"; none is given for {trio.experts[0]}")
    half = {str(trio.experts[0]): 0.3, "twin": 0.1}
    assemble(experts, tmp_path / "four", trio.router, strategy="full", share=half)
    assemble(trio.experts, tmp_path / "three", trio.router, strategy="full")
    x, t = (
        torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1)),
        torch.linspace(0, 1, 5),
    )
    three, four = (load_ensemble(tmp_path / name).weights(x, t) for name in ("three", "four"))
    torch.testing.assert_close(four[:, 0], 0.75 * three[:, 0])
    torch.testing.assert_close(four[:, 3], 0.25 * three[:, 0])
    torch.testing.assert_close(four[:, 1:3], three[:, 1:])


def test_numbers_are_given_names_by_a_file(
    ours: Path, theirs: Path, tmp_path: Path, hddm: Command
) -> None:
    edit_json(theirs / "expert.json", classes=[], null_class=2)
    message = refusal(assemble, [ours, theirs], tmp_path / "no")
    assert (
        f"{theirs}: numbers its classes, and {ours} names them; name them by `classes`" in message
    )
    names = tmp_path / "names.yaml"
    names.write_text('theirs: {"1": columns}\n')
    both = tmp_path / "both"
    code, _, err = hddm(
        "assemble", ours, theirs, "--out", both, "--classes", names, "--share", "ours=0.5"
    )
    assert (code, err) == (0, "")
    facts = derived(both)
    assert facts.classes == ("columns", "rows", "0")
    assert (facts.prior, facts.class_lists) == ((0.5, 0.5), ((), ("0", "columns")))
    # Of ours 9 of 12 images are columns, of theirs 6 of 36.
    assert torch.allclose(
        torch.tensor(facts.class_prior), torch.tensor([[9 / 11, 2 / 11], [1, 0], [0, 1]])
    )
    assert load_ensemble(both).experts[1].classes == ("0", "columns")
    # What was given stays when another expert goes.
    change(both, remove=[0])
    assert derived(both).class_lists == (("0", "columns"),)
    assert contents(theirs) == contents(both / "experts/0")


def test_what_an_expert_without_classes_makes_can_be_named(
    ours: Path, theirs: Path, tmp_path: Path
) -> None:
    theirs = _unconditional(theirs)
    notes = assemble([ours, theirs], tmp_path / "both")
    assert f"{theirs} has no classes, so no class goes to it; name its own by `classes`" in notes
    assert derived(tmp_path / "both").class_prior == ((1, 0), (1, 0))
    assemble([ours, theirs], tmp_path / "named", classes={"theirs": ["dots"]})
    facts = derived(tmp_path / "named")
    assert (facts.classes, facts.class_prior) == (
        ("columns", "rows", "dots"),
        ((1, 0), (1, 0), (0, 1)),
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("theirs: [a]", "theirs: gives 1 different names, and it takes 2 classes"),
        ("theirs: [a, a]", "theirs: gives 1 different names, and it takes 2 classes"),
        ("{theirs: [a, b], '1': [c, d]}", "theirs is named twice; name it once"),
        ("theirs: {dot: a}", "theirs: has 2 classes, and no dot; did you mean 'dots'?"),
        ("theirs: [a, []]", "theirs must have a list of names, or classes with names"),
        ("other: [a, b]", "other: names no expert; choose one of "),
    ],
    ids=str,
)
def test_files_of_names_that_do_not_fit_are_refused(
    content: str, words: str, ours: Path, theirs: Path, tmp_path: Path, hddm: Command
) -> None:
    (tmp_path / "names.yaml").write_text(content)
    options = ("--out", tmp_path / "both", "--classes", tmp_path / "names.yaml")
    code, _, err = hddm("assemble", ours, theirs, *options)
    assert (code, err.count("\n")) == (1, 1)
    assert words in err
    assert not (tmp_path / "both").exists()


def test_classes_of_which_a_file_says_nothing_keep_their_names(
    ours: Path, theirs: Path, tmp_path: Path, hddm: Command
) -> None:
    """By number, by name, and once more in the ensemble, where names that were given count."""
    both, names = tmp_path / "both", tmp_path / "names.yaml"
    names.write_text("theirs: {0: spots}\nours: {columns: rows, rows: columns}\n")
    assert hddm("assemble", ours, theirs, "--out", both, "--classes", names)[0] == 0
    assert derived(both).class_lists == (("rows", "columns"), ("spots", "columns"))
    names.write_text("theirs: {spots: points}\n")
    assert hddm("assemble", both, "--classes", names)[0] == 0
    assert derived(both).class_lists == (("rows", "columns"), ("points", "columns"))


def test_names_are_read_as_they_are_written_in_one_form_of_unicode(tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text('a: [yes, 7]\nb: {"207": golden retriever, 8: x}\n')
    assert read_classes(tmp_path / "names.yaml") == {
        "a": ["yes", "7"],
        "b": {207: "golden retriever", 8: "x"},
    }
    for form in ("NFC", "NFD"):
        (tmp_path / "names.yaml").write_text(
            unicodedata.normalize(form, "a: {caf\u00e9: ros\u00e9}")
        )
        assert read_classes(tmp_path / "names.yaml") == {"a": {"caf\u00e9": "ros\u00e9"}}


def test_a_router_by_moments_needs_no_training(ours: Path, theirs: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    assemble([ours, theirs], both, "moments", strategy="full")
    ensemble = load_ensemble(both, dtype=torch.float64)
    x = torch.randn(6, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    t = torch.linspace(0.05, 1, 6, dtype=torch.float64)
    moments = [hddm.load(folder).calibration.moments for folder in (ours, theirs)]
    expected = MomentsRouter(moments, (0.25, 0.75), MOMENTS_EVIDENCE)(x, t)
    torch.testing.assert_close(ensemble.weights(x, t), expected, rtol=1e-9, atol=1e-9)
    change(both, remove=[0])
    assert derived(both).router == "moments"
    (theirs / CALIBRATION).unlink()
    before = contents(both)
    message = refusal(change, both, add=[theirs])
    assert "has no calibration, as `router` moments needs; run hddm calibrate" in message
    assert contents(both) == before


def test_a_router_that_does_not_know_an_added_expert_is_left_out(
    trio: Trio, theirs: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    assemble(trio.experts, whole, trio.router)
    (theirs / CALIBRATION).unlink()
    write_manifest(theirs)
    with pytest.raises(HddmError, match=r"whole.router does not know"):
        change(whole, add=[theirs], strategy="commit-0.92")
    assert any("draw needs none" in note for note in change(whole, add=[theirs]))
    assert (derived(whole).router, derived(whole).strategy) == (None, "draw")


def test_overlaps_of_shards_are_told(ours: Path, theirs: Path, tmp_path: Path) -> None:
    hashes = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(1000)]
    for expert, own in ((ours, hashes[:600]), (theirs, hashes[450:850])):
        shard = record_of(expert)["shard"] | {"images": len(own), "sketch": sketch_of(own)}
        edit_json(expert / "expert.json", shard=shard)
    (note,) = (
        one
        for one in assemble([ours, theirs], tmp_path / "both")
        if "overlap" in one or "about" in one
    )
    found = re.fullmatch(rf"about (\d+)% of the images of {ours} are those of {theirs}, too", note)
    # 150 of 600, from 128 hashes of the 850 of both: a deviation of 1.7 times 3.4 %.
    assert found is not None
    assert abs(int(found[1]) - 25) < 15


def test_small_shards_overlap_exactly() -> None:
    hashes = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(120)]
    mine, theirs = sketch_of(hashes[:80]), sketch_of(hashes[60:])
    assert overlap(mine, theirs, 80, 60) == pytest.approx(20 / 80)
    assert overlap(theirs, mine, 60, 80) == pytest.approx(20 / 60)
    assert overlap(mine, sketch_of(hashes[80:]), 80, 40) == 0
    assert overlap((), (), 0, 0) == 0
