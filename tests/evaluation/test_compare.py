"""hddm compare: what it refuses and says; its verdicts, against hand and scipy."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from hddm.evaluation.compare import (
    Contrast,
    Figure,
    Gap,
    figure_rows,
    gap_over_seeds,
    holm,
    verdicts,
)
from hddm.evaluation.results import read_groups, refuse_incomparable
from tests.artefacts import Command

SIDE = {"images": 500, "shape": [1, 8, 8]}
RESULT: dict[str, Any] = {
    "format": "2.0",
    "kind": "evaluation",
    "images": 500,
    "splits": [
        {
            "split": "training",
            "distance": {"value": 20.0, "half_width": 1.0, "few_images": False},
            "kernel": {"value": 0.02, "standard_error": 0.002},
            "overlap": {"precision": 0.8, "recall": 0.5, "images": 400},
        },
        {"split": "held_out", "distance": {"value": 22.0, "half_width": 1.5, "few_images": False}},
    ],
    "diversity": 0.9,
    "memorisation": {
        "ratio": 1.1,
        "half_width": 0.1,
        "share_near": 0.04,
        "few_images": False,
        "copies": 0,
    },
    "within_conditions": {"distance": "features", "conditions": 2, "images": 3.0, "reference": 4.0},
    "features": {
        "name": "classifier",
        "dimensions": 64,
        "hash": "aa",
        "resize": "none",
        "device": "cpu",
    },
    "data": {
        "images": {**SIDE, "hash": "0"},
        "reference": {**SIDE, "hash": "r"},
        "held_out": {**SIDE, "hash": "h"},
    },
    "sampling": {
        "source": "a",
        "seed": 0,
        "steps": 50,
        "solver": "euler",
        "guidance_scale": 1.0,
        "start": 0,
    },
    "comparable": True,
    "reasons": [],
}


def _write(path: Path, number: int, **changes: Any) -> Path:
    """A result of its own images; keys of parts are joined by ``__``."""
    result = deepcopy(RESULT)
    result["data"]["images"]["hash"] = str(number)
    for key, value in changes.items():
        part: Any = result
        *above, last = key.split("__")
        for name in above:
            part = (
                part[name]
                if isinstance(part, dict)
                else next(one for one in part if one["split"] == name)
            )
        part[last] = value
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result))
    return path


def _refused(hddm: Command, *arguments: object) -> str:
    code, out, err = hddm("compare", *arguments)
    assert code in (1, 2)
    assert out == ""
    assert err.startswith("hddm: ")
    return err


def test_results_with_different_settings_are_refused_with_the_list(
    tmp_path: Path, hddm: Command
) -> None:
    a = _write(tmp_path / "a.json", 1)
    b = _write(
        tmp_path / "b.json",
        2,
        sampling__steps=10,
        sampling__solver="heun",
        features__hash="bb",
        data__reference__hash="s",
        data__images__images=400,
        sampling__source="b",
        sampling__seed=7,
    )
    err = _refused(hddm, a, b)
    assert "--varies" not in err
    assert [line.strip() for line in err.splitlines()[1:]] == [
        f'features.hash: "aa" in {a}; "bb" in {b}',
        f"images: 500 in {a}; 400 in {b}",
        f'reference.hash: "r" in {a}; "s" in {b}',
        f"steps: 50 in {a}; 10 in {b}",
        f'solver: "euler" in {a}; "heun" in {b}',
    ]


def test_settings_that_differ_on_purpose_are_declared(tmp_path: Path, hddm: Command) -> None:
    a, b = _write(tmp_path / "a.json", 1), _write(tmp_path / "b.json", 2, sampling__steps=10)
    err = _refused(hddm, a, b)
    assert ("steps: 50" in err, "--varies NAME" in err) == (True, True)
    code, out, _ = hddm("compare", a, b, "--varies", "steps")
    assert (code, "within noise (+0.0)" in out) == (0, True)
    c = _write(tmp_path / "c.json", 3, data__reference__hash="s")
    assert 'reference.hash: "r" in' in _refused(hddm, a, c, "--varies", "reference.hash")


def test_a_setting_that_only_one_result_has_is_a_difference(tmp_path: Path, hddm: Command) -> None:
    a, b = _write(tmp_path / "a.json", 1), _write(tmp_path / "b.json", 2, sampling__cfg_channels=3)
    assert f"cfg_channels: not recorded in {a}; 3 in {b}" in _refused(hddm, a, b)
    # Older samples have the default of what only a mask uses.
    old, new = (
        _write(
            tmp_path / f"{value}.json",
            6,
            sampling__resampling_steps=value,
            data__images__hash=f"{value}",
        )
        for value in (10, None)
    )
    assert hddm("compare", old, new)[0] == 0
    unknown = _write(tmp_path / "unknown.json", 3, sampling=None)
    assert f'sampling: "recorded" in {a}; "not recorded" in {unknown}' in _refused(hddm, a, unknown)
    assert hddm("compare", a, unknown, "--varies", "sampling")[0] == 0
    # Classes count by number and name.
    named = [
        _write(
            tmp_path / f"{names[0]}.json",
            k,
            sampling__class_labels=[0, 1],
            sampling__class_names=names,
        )
        for k, names in enumerate((["cat", "dog"], ["ship", "truck"]), 4)
    ]
    assert 'class_labels: ["0 (cat)", "1 (dog)"]' in _refused(hddm, *named)


def test_what_is_marked_as_not_comparable_is_refused_with_its_reasons(
    tmp_path: Path, hddm: Command
) -> None:
    few = "too few images: 64 features, and sides of 48, 48"
    a = _write(tmp_path / "a.json", 1)
    b = _write(tmp_path / "b.json", 2, comparable=False, reasons=[few])
    err = _refused(hddm, a, b)
    assert err == f"hddm: these results do not compare\n  {b}: not comparable: {few}\n"


def test_the_same_images_count_once(tmp_path: Path, hddm: Command) -> None:
    side = tmp_path / "side"
    for name, number in enumerate((1, 2, 1)):
        _write(side / f"{name}.json", number)
    err = _refused(hddm, side, _write(tmp_path / "b.json", 9))
    assert f"{side / '0.json'} and {side / '2.json'}: the same images" in err


def test_what_is_no_result_is_refused(tmp_path: Path, hddm: Command) -> None:
    result, other = _write(tmp_path / "a.json", 1), tmp_path / "other.json"
    other.write_text(json.dumps({"kind": "evaluation", "format": "1.1"}))
    told = "format 1.1 is no longer read; evaluate the images again"
    assert told in _refused(hddm, other, result)
    (tmp_path / "empty").mkdir()
    assert "holds no results" in _refused(hddm, tmp_path / "empty", result)


def test_one_result_is_shown_alone_with_intervals_and_why_it_compares_with_nothing(
    tmp_path: Path, hddm: Command
) -> None:
    result = _write(tmp_path / "a.json", 1, comparable=False, reasons=["too few images"])
    code, out, _ = hddm("compare", result)
    assert code == 0
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if "|" in line
    ]
    shown = {name: value for name, value, meaning in rows[2:] if meaning}
    assert shown["Fréchet distance to held-out images"] == "22.00 ± 1.5"
    assert shown["precision on training images"] == "0.8000 ± 0.039"
    assert shown["nearest-image ratio"] == "1.100 ± 0.10"
    assert "too few images" in out
    for seed in range(2):
        _write(tmp_path / "model" / f"{seed}.json", 2 + seed, diversity=0.5 + seed)
    assert "1.000 (s 0.71)" in hddm("compare", tmp_path / "model")[1]


def test_names_neither_end_a_cell_nor_become_html(tmp_path: Path, hddm: Command) -> None:
    a, b = _write(tmp_path / "a|<b>.json", 1), _write(tmp_path / "b.json", 2)
    code, out, _ = hddm("compare", a, b)
    assert code == 0
    assert "<b>" not in out
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1


def _distance(value: float, half_width: float = 1.0, few: bool = False) -> dict[str, Any]:
    return {"value": value, "half_width": half_width, "few_images": few}


def test_seeds_of_a_model_give_a_spread_apart_from_the_intervals(
    tmp_path: Path, hddm: Command
) -> None:
    values = {"flow": [20.0, 21.0, 25.0], "mixed": [10.0, 11.1, 14.9]}
    for name, found in values.items():
        for seed, value in enumerate(found):
            changes = {
                "splits__held_out__distance": _distance(value, 1.0 + seed),
                "sampling__source": f"{name}/{seed}",
            }
            _write(tmp_path / name / f"{seed}.json", len(name) * 10 + seed, **changes)
    groups = read_groups([tmp_path / "flow", tmp_path / "mixed"])
    refuse_incomparable(groups)
    line = next(one for one in figure_rows(groups) if "held-out" in one.name)
    for figure, found in zip(line.figures, values.values(), strict=True):
        assert figure.mean == pytest.approx(np.mean(found))
        assert figure.spread == pytest.approx(np.std(found, ddof=1))
        assert (figure.half_width, figure.trainings) == (2.0, 3)
    out = hddm("compare", tmp_path / "flow", tmp_path / "mixed")[1]
    assert "22.00 ± 2.0 (s 2.6)" in out
    assert "paired by the names of files or seeds, corrected for 5 comparisons (Holm)." in out
    assert "better (-10)" in out
    assert "of one model" not in out


def test_several_results_of_one_model_say_nothing_about_training(
    tmp_path: Path, hddm: Command
) -> None:
    for seed in range(3):
        for name, source in (("a", "a"), ("c", f"c{seed}")):
            changes = {"sampling__source": source, "sampling__seed": seed}
            _write(tmp_path / name / f"{seed}.json", ord(name) * 10 + seed, **changes)
    out = hddm("compare", tmp_path / "a", tmp_path / "c")[1]
    assert (
        f"All results of {tmp_path / 'a'} are of one model: s is over sampling seeds alone." in out
    )
    assert f"All results of {tmp_path / 'c'}" not in out
    assert "Noise: the intervals over images." in out


def test_figures_that_a_result_lacks_and_nearest_ratios_of_two_kinds_are_left_out(
    tmp_path: Path,
) -> None:
    def named(*files: Path) -> list[str]:
        return [line.name for line in figure_rows(read_groups(files))]

    a = _write(tmp_path / "a.json", 1)
    b = _write(tmp_path / "b.json", 2, splits__held_out__distance=None, within_conditions=None)
    assert "Fréchet distance to training images" in named(a, b)
    assert not any("held-out" in name or "within" in name for name in named(a, b))
    assert "distance within conditions" in named(a, a)
    mirrored = _write(tmp_path / "mirrored.json", 3, memorisation__mirrored=True)
    both = [named(a, a), named(mirrored, mirrored), named(a, mirrored)]
    assert ["nearest-image ratio" in names for names in both] == [True, True, False]


def test_a_share_of_all_or_none_has_an_interval_still(tmp_path: Path) -> None:
    """Wilson's: of 80 of 80, the half-width is 1.96 / 160 times 1.96 / (1 + 1.96² / 80)."""
    all_in = {"precision": 1.0, "recall": 0.5, "images": 80}
    a, b = (_write(tmp_path / f"{k}.json", k, splits__held_out__overlap=all_in) for k in (1, 2))
    found = {line.path: line.figures[0].half_width for line in figure_rows(read_groups([a, b]))}
    assert found["splits.held_out.overlap.precision"] == pytest.approx(
        1.96**2 / 160 / (1 + 1.96**2 / 80)
    )
    assert found["splits.held_out.overlap.recall"] == pytest.approx(0.1070, abs=1e-4)


def _seeds(*values: float) -> dict[str, float]:
    return {str(seed): value for seed, value in enumerate(values)}


def _judged(*gaps: float, better: Any = "lower") -> str:
    contrast = Contrast(Figure(_seeds(*gaps)), Figure(_seeds(*[0.0] * len(gaps))), better)
    return verdicts([contrast])[0].judgement


def test_the_interval_of_paired_gaps_is_that_of_students_t() -> None:
    # The quantile 0.975 of 4 degrees of freedom, from tables; the gaps are 1, 2, 3, 4, 5.
    gap = gap_over_seeds(_seeds(11, 22, 33, 44, 55), _seeds(10, 20, 30, 40, 50))
    half = 2.776445 * 2.5**0.5 / 5**0.5
    assert gap.interval() == pytest.approx((3 - half, 3 + half), rel=1e-6)
    truth = stats.ttest_rel([11, 22, 33, 44, 55], [10, 20, 30, 40, 50])
    assert gap.p_value == pytest.approx(truth.pvalue)


def test_seeds_that_do_not_pair_are_compared_by_their_means() -> None:
    ours, base = [3.0, 4.0, 6.0, 5.0], [7.0, 9.0, 8.5]
    gap = gap_over_seeds(_seeds(*ours), {f"other {k}": value for k, value in enumerate(base)})
    truth = stats.ttest_ind(ours, base, equal_var=False)
    assert gap.p_value == pytest.approx(truth.pvalue)
    assert gap.interval() == pytest.approx(tuple(truth.confidence_interval()))
    assert gap.spread is None


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        ((-5.0,), "no verdict"),
        ((-5.0, -5.1), "no verdict"),
        # Of three seeds the interval holds 0: -2.24 … +0.24, and -1.51 … +0.11.
        ((-0.5, -1.5, -1.0), "within noise"),
        ((-1.0, -0.35, -0.75), "within noise"),
        # Of five it excludes 0: -1.17 … -0.19, though the mean is below twice the deviation.
        ((-1.0, -0.35, -0.75, -0.2, -1.1), "better"),
        ((0.0, 0.0, 0.0), "within noise"),
        ((-1.0, -1.0, -1.0), "better"),
        ((2.0, 2.1, 1.9), "worse"),
    ],
)
def test_a_gap_counts_where_its_interval_excludes_0(gaps: tuple[float, ...], word: str) -> None:
    assert _judged(*gaps) == word
    other = {"better": "worse", "worse": "better"}.get(word, word)
    assert _judged(*gaps, better="higher") == other


def test_levels_are_holms() -> None:
    # In order the p-values are 0.0099, 0.0198, 0.0377 and 0.5, and tried at 0.0125, 0.0167, 0.025 and 0.05.
    gaps = [Gap(mean, 1, 1, 2) for mean in (5.0, 10.0, 0.8165, 7.0)]
    assert [gap.p_value for gap in gaps] == pytest.approx([0.0377, 0.0099, 0.5, 0.0198], abs=2e-4)
    # The second is not rejected, and so is nothing that follows it.
    assert holm(gaps) == pytest.approx([0.05 / 3, 0.05 / 4, 0.05 / 3, 0.05 / 3])
    assert holm([]) == []


def test_comparisons_of_one_table_are_corrected_for_their_number() -> None:
    def contrast(*values: float, why: str | None = None) -> Contrast:
        return Contrast(Figure(_seeds(*values)), Figure(_seeds(*[0.0] * 5)), why=why)

    # s of the gaps is 1; of one, 2.776445/5^½ = 1.2417 decides, of the first of two 3.495406/5^½ = 1.5632.
    shape = (-1.264911, -0.632456, 0.0, 0.632456, 1.264911)
    weak, strong = (contrast(*(mean + one for one in shape)) for mean in (1.4, 2.0))
    assert [one.judgement for one in verdicts([weak])] == ["worse"]
    assert [one.judgement for one in verdicts([weak, weak])] == ["within noise"] * 2
    # The stronger is rejected first, so that the weaker needs no correction any more.
    both = verdicts([weak, strong])
    assert [one.judgement for one in both] == ["worse", "worse"]
    assert both[1].interval == pytest.approx((2 - 1.5632, 2 + 1.5632), abs=1e-4)
    assert both[0].interval == pytest.approx((1.4 - 1.2417, 1.4 + 1.2417), abs=1e-4)
    # What has no verdict is no comparison.
    alone = verdicts([weak, contrast(*shape, why="the same samples")])
    assert [(one.judgement, one.why) for one in alone] == [
        ("worse", None),
        ("no verdict", "the same samples"),
    ]


def _one(mean: float, half: float | None = None, few: bool = False) -> Figure:
    return Figure({"0": mean}, half, few_images=few)


@pytest.mark.parametrize(
    ("ours", "base", "better", "word", "why"),
    [
        # By the intervals, (3² + 4²)^½ = 5.
        (_one(24.9, 4.0), _one(20, 3.0), "lower", "within noise", None),
        (_one(25.1, 4.0), _one(20, 3.0), "lower", "worse", None),
        (_one(14.9, 4.0), _one(20, 3.0), "lower", "better", None),
        (_one(14.9, 4.0), _one(20, 3.0), "higher", "worse", None),
        (_one(6.1), _one(5.0), "lower", "no verdict", "no interval"),
        (_one(14.9, 4.0, few=True), _one(20, 3.0), "lower", "no verdict", "too few images"),
    ],
)
def test_single_results_are_compared_by_their_intervals_over_images(
    ours: Figure, base: Figure, better: Any, word: str, why: str | None
) -> None:
    (found,) = verdicts([Contrast(ours, base, better)], by_images=True)
    assert (found.judgement, found.why) == (word, why)


def test_without_intervals_over_images_fewer_than_three_seeds_give_no_verdict() -> None:
    two = Contrast(Figure(_seeds(5, 5), 1.0), Figure(_seeds(9, 9), 1.0))
    (found,) = verdicts([two])
    assert found.why == "2 training seeds, and 3 or more give a verdict"
    # Further samples of one model are one training.
    fixed = Contrast(Figure(_seeds(5, 5, 5), 1.0, is_one_model=True), Figure(_seeds(9, 9, 9), 1.0))
    assert verdicts([fixed])[0].why == "1 training seed, and 3 or more give a verdict"
    assert verdicts([fixed], by_images=True)[0].judgement == "better"
