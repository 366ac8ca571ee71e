"""Settings from run files and the command line; recipes, with defaults and what resumed runs recorded."""

from pathlib import Path
from typing import Any

import pytest

from hddm.training.settings import (
    NEW,
    AllSettings,
    DistillRecipe,
    DistillSettings,
    ExpertRecipe,
    ExpertSettings,
    LoopFields,
    Recipe,
    RunOptions,
    Start,
    refuse_watched,
    resolve,
    settings_of,
)
from hddm.utils.errors import HddmError
from hddm.utils.records import WHOLE, Record
from tests.artefacts import refusal

BASE = {"objective": "flow", "steps": 5}


def _file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte: 1e-3", "unknown key 'learning_rte'; did you mean 'learning_rate'?"),
        (
            "noise_range: 1:0.5",
            r"key 'noise_range' \(is '1:0.5'\): must be LOW:HIGH, with 0 <= LOW < HIGH",
        ),
        ("batch_size: 8\nbatch_size: 9", "key 'batch_size' twice"),
        (
            "size: tiny\nsteps: [",
            r"is not YAML \(line 2, column 9: while parsing a flow node, expected",
        ),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_what_a_file_should_not_say_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(HddmError, match=rf"^{path}: .*{message}") as error:
        settings_of(ExpertSettings, path, BASE)
    assert "\n" not in str(error.value)
    assert "none.yaml: no such file" in refusal(
        settings_of, ExpertSettings, tmp_path / "none.yaml", BASE
    )


def test_values_are_what_they_are_meant_to_be(tmp_path: Path) -> None:
    """YAML itself takes 1e-4 for a word and no for false."""
    lines = [
        "size: S/2",
        "learning_rate: 1e-4",
        "mixed_precision: no",
        "random_flip: yes",
        "# done",
        "",
    ]
    lines.append("noise_range: 0.5:1")
    expected = BASE | {
        "size": "S/2",
        "learning_rate": 1e-4,
        "mixed_precision": "no",
        "random_flip": True,
    }
    expected["noise_range"] = [0.5, 1]
    for end in ("\n", "\r\n"):
        found = settings_of(ExpertSettings, _file(tmp_path, end.join(lines)), BASE)
        assert found == ExpertSettings.model_validate(expected)
    assert settings_of(ExpertSettings, _file(tmp_path, ""), BASE).steps == 5


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    path = _file(tmp_path, "steps: 7\nbatch_size: 16\nwarmup: 3")
    found = settings_of(ExpertSettings, path, {"objective": "flow", "seed": 4})
    assert (found.steps, found.batch_size, found.warmup, found.seed) == (7, 16, 3, 4)
    assert settings_of(ExpertSettings, path, BASE | {"steps": 9}).steps == 9


def test_a_bad_value_on_the_command_line_is_not_reported_as_the_files(tmp_path: Path) -> None:
    path = _file(tmp_path, "batch_size: 16")
    for given in (
        {"objective": "flow", "steps": 0},
        {"objective": "flw", "steps": 1},
        BASE | {"seed": -1},
    ):
        with pytest.raises(HddmError, match=r"^`(steps` 0|objective` flw|seed` -1): "):
            settings_of(ExpertSettings, path, given)


FLOW = {"steps": 1300, "objective": "flow"}
CONTINUED = Start(is_new=False, prediction="epsilon", rotary=False, noise_range=(0.5, 1.0))


@pytest.mark.parametrize(
    ("requested", "start", "expected"),
    [
        (
            FLOW,
            NEW,
            {
                "optimizer": "muon",
                "learning_rate": 0.2 / 128,
                "muon_learning_rate": 0.02,
                "warmup": 100,
            }
            | {"prediction": "sample", "weighting": "velocity", "time_sampling": "logit-normal"}
            | {"rotary": True, "noise_range": WHOLE, "weak_at": 0.25},
        ),
        (
            FLOW | {"objective": "ddpm", "optimizer": "adamw", "steps": 999},
            NEW,
            {
                "learning_rate": 0.5 / 128,
                "muon_learning_rate": None,
                "warmup": 99,
                "prediction": "epsilon",
            }
            | {"weighting": "prediction", "time_sampling": "uniform"},
        ),
        (
            FLOW | {"objective": "ddpm", "prediction": "sample"},
            NEW,
            {"time_sampling": "logit-normal"},
        ),
        # A scheduler file states a prediction, which a request overrides.
        (
            FLOW | {"objective": "ddpm"},
            Start(prediction="v_prediction"),
            {"prediction": "v_prediction"},
        ),
        (FLOW | {"prediction": "epsilon"}, Start(prediction="sample"), {"prediction": "epsilon"}),
        # The init decides what its network is; all else can be requested.
        (
            FLOW
            | {"prediction": "sample", "weighting": "velocity", "rotary": True, "lora_rank": 2},
            CONTINUED,
            {
                "prediction": "epsilon",
                "weighting": "prediction",
                "rotary": False,
                "noise_range": (0.5, 1.0),
            }
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


def test_a_resumed_run_goes_before_defaults_and_a_request_before_both() -> None:
    before = {
        "optimizer": "muon",
        "learning_rate": 7.0,
        "muon_learning_rate": 0.5,
        "warmup": 3,
        "threads": 9,
    }
    found = resolve(Recipe, LoopFields[None](steps=100, warmup=4), before=before)
    assert found.model_dump().items() >= (before | {"warmup": 4}).items()
    # Another optimizer is not refused for the rates of the one before.
    found = resolve(Recipe, LoopFields[None](steps=100, optimizer="adamw"), before=before)
    assert (found.muon_learning_rate, found.learning_rate) == (None, 7.0)
    with pytest.raises(HddmError, match="`threads` many: must be a whole number"):
        resolve(Recipe, LoopFields[None](steps=100), before={"threads": "many"})


def test_a_recorded_value_of_another_request_is_not_taken() -> None:
    """It would be refused by the name of an option that nobody passed, before the records are compared."""
    routed = {"teacher": "routed", "strategy": "top-1"}
    assert resolve(DistillRecipe, DistillSettings(steps=1), NEW, routed).strategy != "top-1"
    adapter = {"objective": "flow", "lora_rank": 2, "lora_alpha": 2.0}
    assert resolve(ExpertRecipe, ExpertSettings(**FLOW), CONTINUED, adapter).lora_alpha != 2
    whole = {"objective": "flow", "lora_rank": None, "weak_at": 0.5}
    assert (
        resolve(ExpertRecipe, ExpertSettings(**FLOW, lora_rank=2), CONTINUED, whole).weak_at != 0.5
    )


def test_a_setting_that_would_have_no_effect_is_refused() -> None:
    for unused in ({"lora_alpha": 4}, {"lora_rank": 2, "weak_at": 0.5}):
        with pytest.raises(HddmError, match=r"`(lora_rank|weak_at)`"):
            resolve(ExpertRecipe, ExpertSettings(**FLOW, **unused), CONTINUED)


@pytest.mark.parametrize("kind", [ExpertSettings, DistillSettings])
def test_what_does_not_go_with_split_weights_is_refused(kind: type[Record]) -> None:
    base = {name: value for name, value in BASE.items() if name in kind.model_fields}
    split = base | {"shard_weights": True}
    assert kind.model_validate(split).model_dump()["shard_weights"]
    told = refusal(settings_of, kind, None, split | {"compile": True})
    assert told == "`compile` does not work with `shard_weights`; drop one of the two"
    told = refusal(settings_of, kind, None, split | {"mixed_precision": "fp16"})
    assert told == "`mixed_precision` fp16 does not work with `shard_weights`; use bf16"


def test_experts_that_have_one_process_each_have_no_split_weights() -> None:
    told = refusal(settings_of, AllSettings, None, BASE | {"shard_weights": True})
    assert told.startswith("`shard_weights`: each of these experts has one process")


@pytest.mark.parametrize("given", [{"sample_every": 3}, {"held_out": Path("held_out")}])
def test_what_the_first_process_would_do_alone_is_refused_with_split_weights(
    given: dict[str, Any],
) -> None:
    (name,) = given
    told = refusal(refuse_watched, RunOptions.model_validate(given))
    text = "no process has the whole network with `shard_weights`; drop one of the two"
    assert told == f"`{name}`: {text}"
    refuse_watched(RunOptions())
