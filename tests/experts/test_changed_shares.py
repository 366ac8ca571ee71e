"""p(k), names and classes after assembling and changing ensembles, for a table of cases."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.artefacts import Command
from tests.ensemble_files import flow_expert, load_ensemble, saved, shard_of


def _expert(folder: Path, images: int | None, **facts: Any) -> None:
    """An expert of ``images`` in a shard of its own, or of an unknown shard."""
    shard = shard_of(facts.pop("shard", folder.name), images or 0, facts.pop("class_images", ()))
    facts |= {} if images is None else {"shard": shard}
    saved(folder, flow_expert(0, facts, **({"num_classes": 2} if facts.get("classes") else {})))


HIGH, LOW = {"noise_range": (0.6, 1.0)}, {"noise_range": (0.0, 0.6)}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of known and unknown shards, pairs for high and low noise, and experts of classes."""
    root = tmp_path_factory.mktemp("experts")
    for name, images in (("a", 100), ("b", 300), ("c", 600), ("d", 200)):
        _expert(root / name, images)
    for name in ("u", "v", "other/a"):
        _expert(root / name, None)
    for name, images, shard in (("p", 300, "pair"), ("q", None, "")):
        _expert(root / f"{name}_high", images, shard=shard, **HIGH)
        _expert(root / f"{name}_low", images, shard=shard, **LOW)
    _expert(root / "cats", 40, classes=("cat", "dog"), class_images=(30, 10))
    _expert(root / "dogs", 60, classes=("dog", "fox"), class_images=(15, 45))
    _expert(root / "same", 100, classes=("cat", "dog"))
    _expert(root / "none", None, classes=("fox", "owl"))
    return root


CASES: dict[str, tuple[list[str], list[int], str]] = {
    "by size": (["a b c"], [1, 3, 6], "a b c"),
    "an unknown size makes all equal": (["a b u"], [1, 1, 1], "a b u"),
    "one added": (["a b", "--add c"], [1, 3, 6], "a b c"),
    "the unknown one removed": (["a b u", "--remove u"], [1, 3], "a b"),
    "a known one removed": (["a b u v", "--remove a"], [1, 1, 1], "b u v"),
    "an unknown one added": (["a b", "--add u"], [1, 1, 1], "a b u"),
    "removed and added": (["a b c", "--remove b --add d"], [1, 6, 2], "a c d"),
    "a share": (["a b c --share a=0.4"], [2, 1, 2], "a b c"),
    "a share of none": (["a b c --share c=0"], [1, 3, 0], "a b c"),
    "all shares": (["a b --share a=0.2 --share b=0.8"], [1, 4], "a b"),
    "a share, and another removed": (["a b c --share a=0.4", "--remove b"], [2, 3], "a c"),
    "a share removed": (["a b c --share a=0.4", "--remove a"], [1, 2], "b c"),
    "all left have shares": (["a b c --share a=0.2 --share b=0.3", "--remove c"], [2, 3], "a b"),
    "all have shares, one removed": (
        ["a b c --share a=0.2 --share b=0.3 --share c=0.5", "--remove a"],
        [3, 5],
        "b c",
    ),
    "all have shares, one added with one": (
        ["a b --share a=0.25 --share b=0.75", "--add c --share a=0.2 --share b=0.3"],
        [2, 3, 5],
        "a b c",
    ),
    "shares later": (["a b c", "--share b=0.5"], [1, 7, 6], "a b c"),
    "a share, then another": (["a b c --share a=0.4", "--share 1=0.3"], [4, 3, 3], "a b c"),
    "unknown ones keep equal parts": (["u v a b --share a=0.4", "--remove b"], [3, 3, 4], "u v a"),
    "left with shares of zero": (
        ["a b c --share a=0 --share b=0", "--remove c --add d"],
        [0, 0, 1],
        "a b d",
    ),
    "only a zero share is left": (["a b --share a=0", "--remove b --add c"], [0, 1], "a c"),
    "a pair counts once": (["a p_high p_low"], [2, 3, 3], "a p_high p_low"),
    "an unknown pair counts once": (
        ["u q_high q_low --domain q_high,q_low"],
        [2, 1, 1],
        "u q_high q_low",
    ),
    "a pair with a share": (
        ["a p_high b p_low --share p_low=0.6"],
        [1, 3, 3, 3],
        "a p_high b p_low",
    ),
    "a pair with two shares": (
        ["a p_high p_low --share p_low=0.2 --share p_high=0.4"],
        [4, 3, 3],
        "a p_high p_low",
    ),
    "one of a pair removed takes both": (["a b p_high p_low", "--remove p_high"], [1, 3], "a b"),
    "a pair added": (["a b", "--add p_high --add p_low"], [2, 6, 3, 3], "a b p_high p_low"),
    "half of a pair replaced": (
        ["q_high q_low a --domain 0,1 --share 0=0.8", "--remove 1 --add q_low --domain 0,q_low"],
        [2, 1, 2],
        "q_high a q_low",
    ),
    "a pair's share, and one removed": (
        ["a b p_high p_low --share p_high=0.5", "--remove a"],
        [2, 1, 1],
        "b p_high p_low",
    ),
    "a pair and one with shares, third removed": (
        ["a b p_high p_low --share p_high=0.5 --share a=0.1", "--remove b"],
        [2, 5, 5],
        "a p_high p_low",
    ),
    "a pair's share changed": (
        ["a p_high p_low --share p_high=0.5 --share a=0.5", "--share p_low=0.2 --share a=0.8"],
        [8, 1, 1],
        "a p_high p_low",
    ),
    "an unknown pair among known, one removed": (
        ["a b q_high q_low --domain q_high,q_low", "--remove a"],
        [2, 1, 1],
        "b q_high q_low",
    ),
    "an unknown pair left with unknown": (
        ["u v a q_high q_low --domain q_high,q_low", "--remove a", "--remove u"],
        [2, 1, 1],
        "v q_high q_low",
    ),
    "two experts of one name": (["a other/a", "--remove 0 --add b"], [1, 1], "a b"),
    "shares by position": (["a other/a --share 0=0.3"], [3, 7], "a a"),
    "three changes": (["a b", "--add c", "--share c=0.5", "--remove a"], [1, 1], "b c"),
}
"""Commands on the ensemble, first a list of experts; then p(k) up to a factor, and the experts' names."""

CLASSES: dict[str, tuple[list[str], dict[str, list[int]]]] = {
    "one owner": (["cats"], {}),
    "two owners": (["cats dogs"], {"cat": [1, 0], "dog": [2, 3], "fox": [0, 1]}),
    "a share": (["cats dogs --share cats=0.5"], {"cat": [1, 0], "dog": [1, 1], "fox": [0, 1]}),
    "a third without counts": (
        ["cats dogs same"],
        {"cat": [3, 0, 5], "dog": [2, 3, 10], "fox": [0, 1, 0]},
    ),
    "one of an unknown shard": (
        ["cats none"],
        {"cat": [1, 0], "dog": [1, 0], "fox": [0, 1], "owl": [0, 1]},
    ),
    "added": (["cats", "--add dogs"], {"cat": [1, 0], "dog": [2, 3], "fox": [0, 1]}),
    "removed": (["cats dogs same", "--remove dogs"], {"cat": [3, 5], "dog": [1, 5]}),
    "share later": (
        ["cats dogs same", "--share dogs=0.5"],
        {"cat": [3, 0, 5], "dog": [2, 7, 10], "fox": [0, 1, 0]},
    ),
    "nobody counts": (["same", "--add same --remove 0"], {}),
    "beside one without classes": (["cats a"], {"cat": [1, 0], "dog": [1, 0]}),
}
"""Commands as above, then p(k | class) by name up to factors; none where p(k) holds for all classes."""


def _of_sum_1(row: list[int]) -> Any:
    return pytest.approx([one / sum(row) for one in row], rel=1e-12, abs=1e-15)


def _run(commands: list[str], experts: Path, out: Path, hddm: Command) -> None:
    first, *changes = commands
    names, separator, options = first.partition(" --")
    folders = [experts / name for name in names.split()]
    calls = [[*folders, "--out", out, *(separator + options).split()]]
    for change in changes:
        words = change.split()
        added = [
            experts / word if before == "--add" else word for before, word in pairwise(["", *words])
        ]
        calls.append([out, *added])
    for call in calls:
        code, _, err = hddm("assemble", *call)
        assert (code, err) == (0, "")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shares_after_changes(case: str, experts: Path, tmp_path: Path, hddm: Command) -> None:
    commands, shares, names = CASES[case]
    _run(commands, experts, tmp_path / "out", hddm)
    assert load_ensemble(tmp_path / "out").prior.tolist() == _of_sum_1(shares)
    members = json.loads((tmp_path / "out" / "ensemble.json").read_text())["experts"]
    assert [member["name"] for member in members] == names.split()


@pytest.mark.integration
@pytest.mark.parametrize("case", CLASSES, ids=str)
def test_classes_after_changes(case: str, experts: Path, tmp_path: Path, hddm: Command) -> None:
    commands, expected = CLASSES[case]
    _run(commands, experts, tmp_path / "out", hddm)
    model = load_ensemble(tmp_path / "out")
    rows = [] if model.class_prior is None else model.class_prior.tolist()
    found = dict(zip(model.classes, rows, strict=False))
    assert list(found) == list(expected)
    for name, row in expected.items():
        assert found[name] == _of_sum_1(row)
