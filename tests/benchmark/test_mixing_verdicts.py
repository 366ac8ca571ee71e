"""The questions of ``benchmarks.mixing``: their rows exist, and verdicts follow from gaps."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.mixing.__main__ import REGIMES, denoised
from benchmarks.mixing.data import DATA
from benchmarks.mixing.models import Models, Scored
from benchmarks.mixing.verdicts import QUESTIONS, answers
from hddm.objective.records import HeldOutScores


class Names(Models):
    """Titles of rows alone: nothing is trained, so rows have no figures."""

    def expert(self, name: str, shard: str, words: str, seed: int | None = None) -> Path:
        return Path(name)

    def router(self, of):
        return Path(of.router)

    def ensemble(self, name, experts, words=""):
        return Path(name)

    def weighed(self, name, ensemble):
        return Path(name)

    def row(self, title, model, strategy=None):
        return Scored(HeldOutScores.model_construct(strategies=()), [])


@pytest.mark.parametrize("regime", REGIMES)
def test_each_question_asks_about_rows_that_its_regime_has(regime, tmp_path, monkeypatch):
    monkeypatch.setattr(Scored, "__post_init__", lambda self: None)
    titles = REGIMES[regime](Names(DATA["digits"], tmp_path, 0, lambda images: 0.0), "epsilon")
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


def test_denoising_by_the_velocity_that_is_known_but_for_noise_has_its_ratio() -> None:
    """x - t v of a velocity that is off by eps, of variance 0.25: the image is off by t eps."""
    images = torch.rand(2000, 64, generator=torch.manual_seed(0)) * 2 - 1
    noise = torch.randn(images.shape, generator=torch.manual_seed(1))
    off = 0.5 * torch.randn(images.shape, generator=torch.manual_seed(2))
    state, velocity = 0.8 * images + 0.2 * noise, noise - images + off
    error = float((state - 0.2 * velocity - images).square().mean())
    wanted = 10 * math.log10(4 / error)
    scores = {"error at t = 0.2": float(off.square().mean()), "bits": 6.0}
    found = denoised({"mix": {"0": scores}, "drawn": {"0": {"bits": 6.0}}})
    assert found == {"mix": {"0": {"from t = 0.2": pytest.approx(wanted, abs=1e-4)}}}
