"""What a plan knows of models before any step has run, and what it refuses by it."""

from pathlib import Path
from typing import Any

import pytest

from hddm.benchmark.file import BenchmarkFile
from hddm.benchmark.plan import SeedPlan
from hddm.utils.records import parse_record
from hddm.utils.work import Work
from hddm_cli.lines import LINES
from tests.artefacts import refusal

TRAIN = "train expert $parts/shard_0 --objective flow --steps 2"
STEPS = {
    "digits": "data digits",
    "parts": "partition $digits/train --shards 2",
    "first": TRAIN,
    "second": "train expert $parts/shard_1 --objective flow --steps 2",
    "early": f"{TRAIN} --noise-range 0:0.5",
    "late": f"{TRAIN} --noise-range 0.5:1",
    "router": "train router $parts --steps 2",
    "pair": "assemble $first $second --router $router",
    "unrouted": "assemble $first $second",
}
STRATEGIES = ["draw", "top-1", "full"]


def plan(rows: dict[str, str], steps: dict[str, str] | None = None, **changes: Any) -> SeedPlan:
    """A checked plan of `STEPS` and of further ones."""
    content = {
        "name": "models",
        "steps": STEPS | (steps or {}),
        "rows": rows,
        "evaluate": {
            "reference": "$parts",
            "held_out": "$digits/held_out",
            "features": "classifier",
        },
    }
    made = parse_record(content | changes, BenchmarkFile, "models")
    found = SeedPlan(made, 0, Work(Path("jobs")), LINES)
    found.check()
    return found


def varied(steps: dict[str, str]) -> list[str | None]:
    """Strategies of the rows that a table makes of the last step, where it varies them."""
    name = list(steps)[-1]
    tables = {"models": {"vary": {"strategy": STRATEGIES}}}
    rows = plan({"x": f"${name}"}, steps, tables=tables).rows
    return [row.samples.values["strategy"] for row in rows]


# Which models are one network.


@pytest.mark.parametrize(
    "steps",
    [
        {"trio": "assemble $pair --add $early"},
        {"again": "assemble $pair --strategy full"},
        {"again": "assemble $pair", "once more": "assemble $again"},
        {"two": "assemble $first --add $second --router moments"},
        {"wholes": f"{TRAIN} --noise-range 0:1", "x": "assemble $first $wholes --router moments"},
        {"apart": "assemble $early $late $second --router moments"},
        {"of-early": "assemble $early $second --router moments"},
    ],
)
def test_a_changed_ensemble_has_strategies_as_any_other(steps: dict[str, str]) -> None:
    steps = {name.replace(" ", "-"): line for name, line in steps.items()}
    assert varied(steps) == STRATEGIES


@pytest.mark.parametrize(
    "steps",
    [
        {"rest": "assemble $pair --remove 1"},
        {"rest": "assemble $pair --remove second"},
        {"both": "assemble $early $late", "again": "assemble $both --strategy draw"},
        {"cool": "calibrate $early --data $parts/shard_0", "both": "assemble $cool $late"},
        {"soup": "merge $early $early", "both": "assemble $soup $late"},
        {"on": f"{TRAIN} --init $early", "both": "assemble $on $late"},
        {"both": "assemble $first $second --domain $first,$second"},
        {"held": "assemble $pair/experts/0"},
        {
            "of-all": "train all --shards $parts --objective flow --steps 2",
            "x": "assemble $of-all/expert_0",
        },
    ],
)
def test_what_ends_as_one_network_has_no_strategy(steps: dict[str, str]) -> None:
    assert varied(steps) == [None]


def test_a_range_of_noise_may_be_that_of_a_file_of_settings(tmp_path: Path) -> None:
    config = tmp_path / "late.yaml"
    config.write_text("noise_range: 0.5:1\n")
    steps = {"by-file": f"{TRAIN} --config {config}", "both": "assemble $early $by-file"}
    assert varied(steps) == [None]


def test_strategies_that_rows_share_reach_a_changed_ensemble() -> None:
    steps = {"trio": "assemble $pair --add $early"}
    defaults = {"sample": "--strategy full"}
    (by_default,) = plan({"x": "$trio"}, steps, defaults=defaults).rows
    assert by_default.samples.values["strategy"] == "full"
    tables = {"models": {"sample": "--strategy top-1"}}
    (by_table,) = plan({"x": "$trio"}, steps, tables=tables).rows
    assert by_table.samples.values["strategy"] == "top-1"


# What models cannot do.


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("$unrouted --strategy full", "strategy 'full' needs a router"),
        ("$unrouted --strategy commit-0.5", "needs a router"),
        ("$pair --strategy top-3", "top-3 needs 3 experts and there are 2"),
        ("$pair --expert 2", "`expert` 2: choose from 0 to 1"),
        ("$first --expert 1", "`expert` 1: choose from 0 to 0"),
        ("$pair --strategy full --expert 1", "choose one of the two"),
        ("$pair/experts/2", "$pair/experts/2: no such expert; choose from experts/0 to 1"),
    ],
)
def test_a_choice_that_a_model_does_not_have_is_refused(row: str, message: str) -> None:
    assert message in refusal(plan, {"x": row})
    assert message in refusal(plan, {"a": "$pair"}, {"images": f"sample {row}"})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("assemble $first $second --strategy full", "strategy 'full' needs a router"),
        ("assemble $pair --strategy top-3", "top-3 needs 3 experts and there are 2"),
        ("assemble $pair --remove third", "`remove` third: names no expert"),
        ("assemble $first $parts", "$parts: hddm partition writes no model"),
    ],
)
def test_an_ensemble_that_could_not_be_assembled_is_refused(line: str, message: str) -> None:
    assert message in refusal(plan, {"a": "$pair"}, {"x": line})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("$router", "$router: hddm train router writes no model"),
        ("$parts", "$parts: hddm partition writes no model"),
        ("$digits/train", "$digits/train: is no model"),
        ("$parts/shard_0", "$parts/shard_0: is no model"),
        ("$pair/router", "$pair/router: is no model"),
    ],
)
def test_a_row_of_no_model_is_refused(row: str, message: str) -> None:
    assert message in refusal(plan, {"x": row})


def test_what_only_the_assembly_tells_is_no_reason_to_refuse() -> None:
    """A learned router may know the shard of an added expert, or be left out."""
    steps = {"trio": "assemble $pair --add $early --strategy full"}
    assert plan({"x": "$trio --strategy top-3"}, steps).rows


# What options cannot be together, and what a step will not write.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{TRAIN} --init $first --size tiny", "`size`: `init` fixes it"),
        (f"{TRAIN} --lora-rank 4", "`lora_rank` adapts an existing expert; pass `init`"),
        ("distill $pair --data $parts --steps 2 --size tiny --init $first", "`init` fixes it"),
        ("distill $pair --data $parts --steps 2 --sampling-steps 2", "pass `init`"),
        ("train all --shards $parts --objective flow --steps 2 --lora-rank 4", "pass `init`"),
        ("merge $first $second --weights x,y", "write one number per expert"),
        ("merge $first $second --weights 0.5,0.4", "give 2 numbers of 0 or more that sum to 1"),
        ("partition $digits/train", "pass one"),
        ("partition $digits/train --shards 2 --classes a=0,1", "pass one"),
        (
            "train expert $parts/shard_2 --objective flow --steps 2",
            "$parts/shard_2: no such shard; $parts has 2, from shard_0",
        ),
        (
            "train expert $small/shard_2 --objective flow --steps 2",
            "$small/shard_2: no such shard; $small has 2",
        ),
        (
            "train expert $by-class/shard_1/images --objective flow --steps 2",
            "$by-class/shard_1/images: no such shard; $by-class has 1",
        ),
        ("partition $parts/held_out --shards 1", "$parts/held_out: $parts holds no images out"),
    ],
)
def test_a_step_that_could_not_run_is_refused(line: str, message: str) -> None:
    steps = {
        "small": "encode $parts --resolution 4",
        "by-class": "partition $digits/train --classes a=0,1",
        "x": line,
    }
    assert message in refusal(plan, {"a": "$pair"}, steps)


def test_a_default_that_does_not_go_with_a_step_is_refused_before_others_run() -> None:
    steps = {"tuned": f"{TRAIN} --init $first"}
    defaults = {"train expert": "--size tiny"}
    told = refusal(plan, {"a": "$tuned"}, steps, defaults=defaults)
    assert told == "step 'tuned': `size`: `init` fixes it; leave it out"


def test_samples_that_cannot_be_scored_are_no_row() -> None:
    assert "only pictures are scored" in refusal(plan, {"a": "$pair --output-type latent"})
    assert plan({"a": "$pair"}, {"latents": "sample $pair --output-type latent"}).rows
