"""The distillation benchmark: budgets and verdicts by hand, and the whole of it on tiny models."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.distillation import few_steps
from benchmarks.distillation.measure import measure_distillation
from benchmarks.distillation.report import ratio
from benchmarks.distillation.settings import (
    CONTROL,
    COUNTED,
    FULL,
    MIXTURE,
    QUICK,
    ROWS,
    STUDENT,
    TEACHER,
)
from benchmarks.harness import Start
from hddm.training.mean_flow import STUDENT_STEPS


def test_students_have_a_quarter_of_the_teachers_compute_without_and_with_its_forwards() -> None:
    # Four experts of 700 steps at batch 64; three forwards an image trained on, one to ask the teacher.
    teacher = 4 * 700 * 64 * 3
    assert FULL.images(TEACHER) * 3 == FULL.images(MIXTURE) * 3 == teacher
    assert FULL.images(STUDENT) * 3 == FULL.images(CONTROL) * 3 == teacher / 4
    assert FULL.images(COUNTED) * (3 + 1) == teacher / 4
    assert FULL.compute(STUDENT) == pytest.approx((1 / 4, 1 / 3))
    assert FULL.compute(COUNTED) == pytest.approx((3 / 16, 1 / 4))
    assert FULL.compute(CONTROL) == (1 / 4, 1 / 4)
    for recipe in FULL.recipes:
        for row in (STUDENT, COUNTED):
            own = FULL.student(row, recipe, 0)
            assert own.steps * own.batch_size == FULL.images(row)
        control = FULL.control(recipe, 0)
        assert control.steps * control.batch_size == FULL.images(STUDENT)


def test_a_ratio_is_taken_within_a_training_and_held_against_the_goal() -> None:
    def run(teacher: float, student: float) -> dict[str, Any]:
        rows = {TEACHER: teacher, STUDENT: student}
        return {"rows": {name: {"to_held_out": {"value": value}} for name, value in rows.items()}}

    assert ratio([run(10, 11), run(20, 24)], STUDENT, "to_held_out") == "1.15 (s 0.07), within the goal"
    assert ratio([run(10, 12)], STUDENT, "to_held_out") == "1.20, beyond the goal"


@pytest.mark.slow
def test_the_whole_benchmark_runs_and_keeps_what_it_has_measured(tmp_path: Path) -> None:
    for _ in range(2):
        path = measure_distillation(QUICK, Start(tmp_path / "results", tmp_path / "work"))
    content = json.loads(path.with_suffix(".json").read_text())
    assert set(content["runs"][0]["rows"]) == set(ROWS)
    assert set(content["tuning"]) == {STUDENT, CONTROL}
    text = path.read_text()
    assert all(f"| {row} " in text for row in ROWS)
    assert path.with_suffix(".png").stat().st_size > 5_000
    assert len(list((tmp_path / "work" / QUICK.name / "seed_0" / "rows").glob("*.png"))) == len(ROWS)


@pytest.mark.slow
def test_students_of_few_steps_are_trained_scored_and_timed(tmp_path: Path) -> None:
    path = few_steps.measure(few_steps.SHORT, Start(tmp_path / "results", tmp_path / "work"))
    content = json.loads(path.with_suffix(".json").read_text())
    rows = set(content["runs"][0]["rows"])
    assert len(rows) == len(few_steps.KINDS) * (2 + len(STUDENT_STEPS))
    assert set().union(*content["seconds"].values()) == rows
    assert path.read_text().count("| student, 2 steps ") == len(few_steps.KINDS)
