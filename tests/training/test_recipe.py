"""Recipes: what is requested comes first, then the run that is resumed, then defaults."""

from typing import Any

import pytest
from pydantic import ValidationError

from hddm.training.settings import (
    NEW,
    DistillRecipe,
    DistillSettings,
    ExpertRecipe,
    ExpertSettings,
    LoopSettings,
    Recipe,
    RouterRecipe,
    RouterSettings,
    Start,
    resolve,
)
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.records import WHOLE

FLOW = {"steps": 1300, "objective": "flow"}
CONTINUED = Start(is_new=False, prediction="epsilon", rotary=False, noise_range=(0.5, 1.0))


@pytest.mark.parametrize(
    ("requested", "start", "expected"),
    [
        (
            FLOW,
            NEW,
            {"optimizer": "muon", "learning_rate": 0.2 / 128, "muon_learning_rate": 0.02, "warmup": 100}
            | {"prediction": "sample", "weighting": "velocity", "time_sampling": "logit-normal"}
            | {"rotary": True, "noise_range": WHOLE, "weak_at": 0.25},
        ),
        (
            FLOW | {"objective": "ddpm", "optimizer": "adamw", "steps": 999},
            NEW,
            {"learning_rate": 0.5 / 128, "muon_learning_rate": None, "warmup": 99, "prediction": "epsilon"}
            | {"weighting": "prediction", "time_sampling": "uniform"},
        ),
        (FLOW | {"objective": "ddpm", "prediction": "sample"}, NEW, {"time_sampling": "logit-normal"}),
        # A scheduler file states a prediction, which a request overrides.
        (FLOW | {"objective": "ddpm"}, Start(prediction="v_prediction"), {"prediction": "v_prediction"}),
        (FLOW | {"prediction": "epsilon"}, Start(prediction="sample"), {"prediction": "epsilon"}),
        # The init decides what its network is; all else can be requested.
        (
            FLOW | {"prediction": "sample", "weighting": "velocity", "rotary": True, "lora_rank": 2},
            CONTINUED,
            {"prediction": "epsilon", "weighting": "prediction", "rotary": False, "noise_range": (0.5, 1.0)}
            | {"optimizer": "adamw", "learning_rate": 1e-4, "weak_at": 0.0, "lora_alpha": 2.0},
        ),
        (FLOW | {"weak_at": 0.5, "noise_range": (0.0, 0.5)}, CONTINUED, {"weak_at": 0.5}),
    ],
)
def test_an_expert_has_its_defaults(requested: Any, start: Start, expected: dict[str, Any]) -> None:
    recipe = resolve(ExpertRecipe, ExpertSettings(**requested, threads=3), start)
    assert recipe.model_dump().items() >= (expected | {"threads": 3}).items()
    again = ExpertSettings.model_validate(recipe.model_dump())
    if start.is_new:
        assert resolve(ExpertRecipe, again) == recipe


def test_routers_and_students_have_theirs() -> None:
    router = resolve(RouterRecipe, RouterSettings(steps=10, optimizer="adamw"))
    assert (router.size, router.learning_rate) == ("tiny", 0.125 / 32)
    student = resolve(DistillRecipe, DistillSettings(steps=10, teacher="routed"), Start(strategy="full"))
    assert (student.strategy, student.prediction, student.time_sampling) == ("full", "sample", "logit-normal")


def test_a_resumed_run_goes_before_defaults_and_a_request_before_both() -> None:
    before = {"optimizer": "muon", "learning_rate": 7.0, "muon_learning_rate": 0.5, "warmup": 3, "threads": 9}
    found = resolve(Recipe, LoopSettings(steps=100, warmup=4), before=before)
    assert found.model_dump().items() >= (before | {"warmup": 4}).items()
    # Another optimizer is not refused for the rates of the one before.
    found = resolve(Recipe, LoopSettings(steps=100, optimizer="adamw"), before=before)
    assert (found.muon_learning_rate, found.learning_rate) == (None, 7.0)
    with pytest.raises(HddmError, match="`threads` many: must be a whole number"):
        resolve(Recipe, LoopSettings(steps=100), before={"threads": "many"})


def test_a_rate_of_muon_needs_muon() -> None:
    with pytest.raises(UsageError, match=r"`muon_learning_rate` 0\.1: this training uses AdamW only"):
        resolve(Recipe, LoopSettings(steps=1, muon_learning_rate=0.1), Start(is_new=False))


@pytest.mark.parametrize(
    ("kind", "requested", "start", "before", "expected"),
    [
        (
            DistillRecipe,
            DistillSettings(steps=1),
            NEW,
            {"teacher": "routed", "strategy": "top-1"},
            "strategy",
        ),
        (
            ExpertRecipe,
            ExpertSettings(**FLOW),
            CONTINUED,
            {"objective": "flow", "lora_rank": 2, "lora_alpha": 2.0},
            "lora_alpha",
        ),
        (
            ExpertRecipe,
            ExpertSettings(**FLOW | {"objective": "ddpm"}),
            NEW,
            {"objective": "flow", "prediction": "flow_prediction"},
            "prediction",
        ),
        (
            ExpertRecipe,
            ExpertSettings(**FLOW, lora_rank=2),
            CONTINUED,
            {"objective": "flow", "lora_rank": None, "weak_at": 0.5},
            "weak_at",
        ),
    ],
)
def test_a_recorded_value_of_another_request_is_not_taken(
    kind: Any, requested: Any, start: Start, before: dict[str, Any], expected: str
) -> None:
    """It would be refused by the name of an option that nobody passed, before the records are compared."""
    assert getattr(resolve(kind, requested, start, before), expected) != before[expected]


def test_a_recipe_without_a_value_that_settings_leave_open_is_refused() -> None:
    with pytest.raises(ValidationError):
        ExpertRecipe(objective="flow", steps=10)
