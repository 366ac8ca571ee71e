"""The questions of ``benchmarks.mixing``: their rows exist, and verdicts follow from gaps."""

from pathlib import Path

import pytest

from benchmarks.mixing.__main__ import REGIMES, Digits, Row
from benchmarks.mixing.verdicts import QUESTIONS, answers
from hddm.objective.records import HeldOutScores


class Names(Digits):
    """Titles of rows alone: nothing is trained, so rows have no figures."""

    def expert(self, name: str, shard: str, words: str, seed: int | None = None) -> Path:
        return Path(name)

    def ensemble(self, name, experts, words=""):
        return Path(name)

    def weighed(self, name, ensemble):
        return Path(name)

    def row(self, title, model, strategy=None):
        return Row(HeldOutScores.model_construct(strategies=()), [])


@pytest.mark.parametrize("regime", REGIMES)
def test_each_question_asks_about_rows_that_its_regime_has(regime, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.mixing.__main__.run_once", lambda out, words: None)
    monkeypatch.setattr(Row, "__post_init__", lambda self: None)
    titles = REGIMES[regime](Names(tmp_path, 0, lambda images: 0.0), "epsilon")
    for question in QUESTIONS[regime]:
        assert {question.row, question.base} <= set(titles)


def verdict(gaps: list[float]) -> str:
    """The verdict on distances that differ from 10 by these gaps, where a tenth matters."""
    question = QUESTIONS["by-noise"][1]
    figures = {question.row: {}, question.base: {}}
    for other in QUESTIONS["by-noise"]:
        for title in (other.row, other.base):
            figures.setdefault(title, {})
    for seed, gap in enumerate(gaps):
        for title in figures:
            figures[title][str(seed)] = {"distance": 10.0}
        figures[question.row][str(seed)] = {"distance": 10.0 + gap}
    found = [one for one in answers("by-noise", figures) if one.question == question]
    return found[0].verdict


def test_verdicts_tell_ahead_behind_level_and_open_apart():
    assert verdict([-2.0, -2.2, -1.9, -2.1, -2.05]) == "ahead"
    assert verdict([2.0, 2.2, 1.9, 2.1, 2.05]) == "behind"
    assert verdict([0.1, -0.1, 0.12, -0.08, 0.02]) == "level"  # the interval is within a tenth
    assert verdict([0.5, 0.51, 0.49, 0.5, 0.52]) == "level"  # real, and too small to matter
    assert verdict([3.0, -2.0, 4.0, -1.0, 2.0]) == "open"
