"""The one verdict: Student's interval of gaps over seeds, corrected by Holm, against hand and scipy."""

from typing import Any

import pytest
from scipy import stats

from hddm.evaluation.verdict import Contrast, Figure, Gap, gap_over_seeds, holm, verdicts


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
