"""Random benchmark files against the same commands run by hand, and starts that are killed at random."""

import itertools
import json
import os
import random
import shlex
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hddm.benchmark.file import BenchmarkFile
from hddm.benchmark.results import read_results
from hddm.data.images import have_equal_pixels
from hddm.utils.records import parse_record
from hddm_cli.app import run_words
from tests.benchmark_files import Finished, inline, live, run_inline, without_times, write_sides
from tests.killed_runs import in_a_process

Options = dict[str, str]


class Step(NamedTuple):
    """A command as its author means it: verb, arguments, own options."""

    verb: str
    arguments: tuple[str, ...]
    options: Options


class Written(NamedTuple):
    """A benchmark as its author means it, and the file in which it is spelt."""

    steps: dict[str, Step]
    defaults: dict[str, Options]
    rows: dict[str, Step]
    tables: dict[str, tuple[tuple[str, ...], Options, dict[str, tuple[str, ...]], bool]]
    seed: int


def _draw(chance: random.Random) -> Written:
    """Draw a benchmark of two to four experts, two ensembles and some rows."""
    size = {"size": "tiny", "batch-size": "8", "optimizer": "adamw", "threads": "1"}
    expert = {"steps": "3", "objective": "flow", **size}
    defaults = {
        "train expert": {name: value for name, value in expert.items() if chance.random() < 0.5},
        "sample": {"num-images": "20", "solver": "euler", "steps": "2"},
    }
    held_out = {"held-out": "0.4"}
    steps = {
        "parts": Step("partition", ("$data/train",), {"shards": "2", **held_out}),
        "all": Step("partition", ("$data/train",), {"shards": "1", **held_out}),
        "router": Step("train router", ("$parts",), {"steps": "3", **size}),
    }
    experts = [f"expert-{k}" for k in range(chance.randint(2, 4))]
    for name in experts:
        own = {key: value for key, value in expert.items() if key not in defaults["train expert"]}
        for key, values in (("steps", "2 3 4"), ("objective", "ddpm flow"), ("seed", "0 7")):
            if chance.random() < 0.4:
                own[key] = chance.choice(values.split())
        steps[name] = Step("train expert", (f"$parts/shard_{chance.randrange(2)}",), own)
    # One on each shard, so that they can be put together.
    for k, name in enumerate(experts[:2]):
        steps[name] = steps[name]._replace(arguments=(f"$parts/shard_{k}",))
    for name in ("both", "both-again"):
        strategy = {"strategy": chance.choice(["draw", "top-1", "full"])}
        steps[name] = Step(
            "assemble", (f"${experts[0]}", f"${experts[1]}"), {"router": "$router", **strategy}
        )
    rows = {}
    for name in ("a", "A", "a b", "third"):
        own = {}
        for key, values in (("steps", "1 2 3"), ("num-images", "20 24"), ("seed", "0 5")):
            if chance.random() < 0.4:
                own[key] = chance.choice(values.split())
        rows[name] = Step("sample", (f"${chance.choice([*experts, 'both', 'both-again'])}",), own)
    tables = {}
    for name in chance.sample(["t", "T", "other"], chance.randint(1, 3)):
        options = {"solver": "heun"} if chance.random() < 0.3 else {}
        vary: dict[str, tuple[str, ...]] = {}
        if chance.random() < 0.4:
            vary["steps"] = ("1", "3")
        if chance.random() < 0.3:
            vary["strategy"] = ("draw", "full")
        chosen = tuple(chance.sample(list(rows), chance.randint(1, 3)))
        tables[name] = chosen, options, vary, chance.random() < 0.5
    return Written(steps, defaults, rows, tables, chance.choice([0, 3]))


def _spell(options: Options, chance: random.Random, arguments: tuple[str, ...] = ()) -> str:
    """Options, in any order and either spelling, with the arguments somewhere among them."""
    groups = []
    for name, value in options.items():
        groups.append(chance.choice([[f"--{name}={value}"], [f"--{name}", value]]))
    chance.shuffle(groups)
    groups.insert(chance.randint(0, len(groups)), list(arguments))
    return shlex.join(word for group in groups for word in group).replace("'", "")


def _file(written: Written, chance: random.Random) -> BenchmarkFile:
    tables = {}
    for name, (rows, options, vary, product) in written.tables.items():
        tables[name] = {
            "rows": rows,
            "sample": _spell(options, chance),
            "vary": vary,
            "product": product,
        }
    content = {
        "name": "drawn",
        "defaults": {verb: _spell(options, chance) for verb, options in written.defaults.items()},
        "steps": {
            name: f"{step.verb} {_spell(step.options, chance, step.arguments)}"
            for name, step in written.steps.items()
        },
        "rows": {
            name: f"{step.arguments[0]} {_spell(step.options, chance)}"
            for name, step in written.rows.items()
        },
        "tables": tables,
        "evaluate": {
            "reference": "$all",
            "held_out": "$data/test",
            "features": "classifier",
            "options": "--allow-few --brief",
        },
        "seeds": [written.seed],
    }
    return parse_record(content, BenchmarkFile, "drawn")


def _rows(written: Written) -> Iterator[tuple[str, str, Options, Options]]:
    """Table, row, what is varied in it, and the options that it means."""
    for title, (rows, sample, vary, product) in written.tables.items():
        changes: list[Options] = [{}]
        if product:
            changes = [
                dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())
            ]
        elif vary:
            changes = [{}] if len(vary) > 1 else []
            changes += [{key: value} for key, values in vary.items() for value in values]
        for row in rows:
            step = written.rows[row]
            seen = []
            for change in changes:
                is_ensemble = step.arguments[0].startswith("$both")
                varied = {
                    key: one for key, one in change.items() if is_ensemble or key != "strategy"
                }
                if varied not in seen:
                    seen.append(varied)
                    options = {**written.defaults["sample"], **step.options, **sample, **varied}
                    yield title, row, varied, options


class ByHand:
    """The commands of a drawn benchmark, each run by hand in a folder of its own."""

    def __init__(self, written: Written, data: Path, folder: Path) -> None:
        self.written, self.data, self.folder = written, data, folder
        for name, step in written.steps.items():
            options = {**written.defaults.get(step.verb, {}), **step.options}
            if step.verb.startswith("train"):
                options = {"seed": str(written.seed), **options}
            self.run([*step.verb.split(), *step.arguments], options, folder / name)
        self.classifier = folder / "real.safetensors"
        self.evaluate(
            data / "test", {"save-classifier": str(self.classifier), "features": "classifier"}
        )

    def run(self, words: list[str], options: Options, out: Path) -> None:
        given = [
            *words,
            *(word for name, value in options.items() for word in (f"--{name}", value)),
        ]
        run_words([*map(self.place, given), "--out", str(out)])

    def place(self, word: str) -> str:
        return word.replace("$data", str(self.data)).replace("$", f"{self.folder}/")

    def evaluate(self, images: Path, options: Options) -> dict[str, Any]:
        out = self.folder / f"{images.name}.json"
        against = ["--reference", "$all", "--held-out", "$data/test", "--allow-few", "--brief"]
        self.run(["evaluate", str(images), *against], options, out)
        content: dict[str, Any] = json.loads(out.read_text())
        return content


def _check(number: int, data: Path, folder: Path) -> None:
    chance = random.Random(number)
    written = _draw(chance)
    results = run_inline(_file(written, chance), folder / "out", data)
    with inline():
        hand = ByHand(written, data, folder / "hand")
        expected = {}
        for count, (title, row, varied, options) in enumerate(_rows(written)):
            samples = hand.folder / f"samples-{count}"
            words = ["sample", *written.rows[row].arguments]
            hand.run(words, {"seed": str(written.seed), **options}, samples)
            scores = hand.evaluate(samples, {"features": str(hand.classifier)})
            expected[title, row, _key(varied)] = samples, scores
    found = {(one.table, one.of, _key(one.varied)): one for one in results.scored}
    assert found.keys() == expected.keys()
    for key, (samples, scores) in expected.items():
        ours = folder / "out" / shlex.split(found[key].command)[-1]
        # The files name the hash of their model, in whose record is how long its training took.
        images = sorted(samples.glob("*.png"))
        assert [path.name for path in sorted(ours.glob("*.png"))] == [path.name for path in images]
        for path in images:
            assert have_equal_pixels(path, ours / path.name), path.name
        evaluation = json.loads(found[key].evaluation.model_dump_json())
        assert evaluation["splits"] == scores["splits"]
        assert evaluation["data"]["images"]["hash"] == scores["data"]["images"]["hash"]


def _key(varied: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(varied.items()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(1, 20))]
)
def test_each_row_of_a_random_file_is_what_its_commands_give_by_hand(
    number: int, tmp_path: Path
) -> None:
    _check(number, write_sides(tmp_path / "data"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_killed_again_and_again_it_comes_to_the_same_results(
    number: int, miniature: Finished, tmp_path: Path
) -> None:
    chance, out = random.Random(number), tmp_path / "out"
    kills = 0
    for _ in range(30):
        process = in_a_process(live, miniature.file, out, miniature.data, None)
        process.join(chance.uniform(0.1, 2.5))
        if process.exitcode is not None:
            assert process.exitcode == 0
            break
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        kills += 1
    process = in_a_process(live, miniature.file, out, miniature.data, None)
    process.join()
    assert process.exitcode == 0
    assert kills
    assert without_times(read_results(out)) == without_times(miniature.results)
