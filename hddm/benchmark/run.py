"""A benchmark from its file to its results: does what is missing, scores, compares.

OUT/
  benchmark.json                       the file in full
  jobs/                                what each step wrote, by content (`hddm.utils.work`)
  results.json, tables.md, report.html
  <step>, samples/, scores/            links to the steps, samples and scores of seed 0, and of all seeds
  seed_<n>/…                           links to those of another seed

The same command resumes after a kill at any moment: a step that is done is not done again, and one that is
not continues as its own verb does. Results are written after each seed.
"""

import datetime
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hddm.benchmark.costs import cost_path
from hddm.benchmark.file import BenchmarkFile
from hddm.benchmark.lines import CommandLine, RunCommand
from hddm.benchmark.objective import compare_objective
from hddm.benchmark.origin import model_cost
from hddm.benchmark.overlap import refuse_shared_images
from hddm.benchmark.plan import PlannedRow, SeedPlan
from hddm.benchmark.report import tables_text, write_report
from hddm.benchmark.results import (
    FORMAT,
    LARGEST,
    SECOND,
    ModelResult,
    ObjectiveScores,
    Results,
    SameImages,
    ScoredRow,
    StepRecord,
)
from hddm.benchmark.seed_run import SeedRun, units_with_counting
from hddm.benchmark.steps import Contents, Step
from hddm.benchmark.verdicts import compare_rows
from hddm.data.images import have_equal_pixels
from hddm.evaluation.results import read_result
from hddm.objective.records import HeldOutScores, read_scores
from hddm.utils.errors import HddmError, counted, shown
from hddm.utils.files import (
    alone,
    check_absent,
    is_empty,
    read_json,
    remove,
    write_json,
    write_whole,
)
from hddm.utils.processes import stoppable
from hddm.utils.progress import Progress
from hddm.utils.records import BENCHMARK_FILE, RESULTS_FILE, SAMPLING_FILE, HashCache
from hddm.utils.work import Work, differences, hash_of
from hddm.utils.workers import Backend, Workers

log = logging.getLogger(__name__)
_KEPT = "finished work is saved, and the same command continues"


def run_benchmark(
    file: BenchmarkFile,
    out: Path,
    lines: CommandLine,
    *,
    data: Path | None = None,
    jobs: Path | None = None,
    overwrite: bool = False,
    shows_commands: bool = False,
    headline: Callable[[Results], str] | None = None,
    backend: Backend | None = None,
) -> Results:
    """Run a benchmark in ``out``, or resume it.

    Args:
        file: the benchmark.
        out: its folder.
        lines: parses the command lines of steps, and runs them in worker processes; all are parsed first.
        data: the folder of the user's images, ``$data``.
        jobs: what steps wrote, by default ``out/jobs``; benchmarks that share it share their steps.
        overwrite: replace results of another file in ``out``; jobs stay.
        shows_commands: print every command as it runs.
        headline: what the report says at its top, by default the file's title.
        backend: where steps run, by default in ``file.workers`` processes of this machine.

    Raises:
        HddmError: for an ``out`` that holds anything else, jobs in use, and whatever a command raises, with
            the step's name.
        Stopped: after a signal, with all finished work saved.
    """
    work = Work(jobs or out / "jobs", other="another folder")
    plans = _plans(file, work, lines, data)
    with stoppable(f"{out}: stopped; {_KEPT}"), alone(out):
        check_out(out, file, overwrite)
        out.mkdir(parents=True, exist_ok=True)
        # Before the jobs, without which this folder would be one of files that nobody knows.
        content = {"format": FORMAT, "settings": file.model_dump(mode="json")}
        write_whole(out / BENCHMARK_FILE, lambda draft: write_json(draft, content))
        with work.held():
            return _run(file, plans, out, lines.run, shows_commands, headline, backend)


def _plans(
    file: BenchmarkFile, work: Work, lines: CommandLine, data: Path | None
) -> list[SeedPlan]:
    """Plans of all seeds, which are checked; paths may have the seed in them."""
    contents = Contents()
    plans = [SeedPlan(file, seed, work, lines, data, contents) for seed in file.seeds]
    for plan in plans:
        plan.check()
    return plans


def _run(
    file: BenchmarkFile,
    plans: Sequence[SeedPlan],
    out: Path,
    run: RunCommand,
    shows_commands: bool,
    headline: Callable[[Results], str] | None,
    backend: Backend | None,
) -> Results:
    before = _results_before(out, file)
    by_identity: dict[str, Step] = {}
    for plan in plans:
        by_identity |= {step.identity: step for step in plan.all}
    steps = list(by_identity.values())
    _forget_damaged(steps)
    for plan in plans:
        # Of images that are on the disk already.
        refuse_shared_images(plan)
    left = [step for step in steps if not step.is_done]
    planned = sum(map(units_with_counting, steps))
    missing = sum(map(units_with_counting, left))
    if left:
        where = f", {file.workers} at a time" if backend is None else ""
        text = f"{counted(len(left), 'step')} to run{where}"
    elif before:
        text = f"was finished on {before['date']}"
    else:
        text = "all its steps are done"
    print(f"{out}: {text}", file=sys.stderr, flush=True)

    def now() -> list[str]:
        return [f"now {'; '.join(shown(workers.running, 8))}"] if workers.running else []

    progress = Progress(planned, file.name, more=now, is_even=False)
    with backend or Workers(file.workers) as workers, progress:
        progress.skip(planned - missing)
        for k, plan in enumerate(plans, 1):
            SeedRun(plan, out, run, workers, progress, shows_commands).do_all()
            results = collect(file, plans[:k])
            is_last = k == len(plans)
            if {**before, "date": results.date} == results.model_dump(mode="json"):
                # Nothing else is new.
                results = results.model_copy(update={"date": before["date"]})
            # While seeds that were there before follow, theirs stay.
            if is_last or set(before.get("seeds", ())) <= set(results.seeds):
                _write(out, results, headline)
    return results


def _results_before(out: Path, file: BenchmarkFile) -> dict[str, Any]:
    """Results of an earlier start of the same file, perhaps of other seeds; empty without any."""
    if not (out / RESULTS_FILE).is_file():
        return {}
    before = read_json(out / RESULTS_FILE, LARGEST)
    then = dict(before.get("settings", {}))
    now = file.model_dump(mode="json")
    for name in ("seeds", "workers"):
        then.pop(name, None)
        now.pop(name)
    return before if then == now and "date" in before else {}


def _forget_damaged(steps: Sequence[Step]) -> None:
    """Remove what steps wrote if it was changed or removed since, so that they run again."""
    done = [step for step in steps if step.is_done]
    if not done:
        return
    hashes = HashCache(done[0].work.folder)
    for step in done:
        problem = step.damage(hashes)
        if problem:
            log.warning("%s: %s since it was written; this step runs again", step.label, problem)
            step.forget()
    hashes.keep()


def commands(file: BenchmarkFile, lines: CommandLine, data: Path | None = None) -> Iterator[str]:
    """The command lines of a benchmark, in order, to be run in an empty folder."""
    yielded: set[str] = set()
    for plan in _plans(file, Work(Path("jobs")), lines, data):
        # Evaluations write files, and everything else a folder of its own.
        folders = {Path("scores")}
        folders |= {Path(step.label).parent for step in plan.all if step.verb == "evaluate"}
        yield f"mkdir -p {' '.join(sorted(str(one) for one in folders if one.parts))}"
        for step in plan.all:
            if step.label not in yielded:
                yield step.shown
            yielded.add(step.label)


def check_out(out: Path, file: BenchmarkFile, overwrite: bool = False) -> None:
    """Refuse a folder of another kind, and unless ``overwrite``, results of other settings or seeds."""
    if is_empty(out):
        for draft in out.iterdir():
            # Of a process that was killed before it had written anything else.
            remove(draft)
    check_absent(out.absolute(), BENCHMARK_FILE, overwrite=True)
    if overwrite or not (out / RESULTS_FILE).is_file():
        return
    now: dict[str, Any] = file.model_dump(mode="json", exclude={"workers"})
    before = dict(read_json(out / BENCHMARK_FILE).get("settings", {}))
    before.pop("workers", None)
    if set(before.get("seeds", ())) <= set(file.seeds):
        # Additional seeds lose nothing.
        before["seeds"] = now["seeds"]
    differing = differences(before, now)
    if differing:
        raise HddmError(
            f"{out}: has results of other settings; choose another folder (`jobs` {out / 'jobs'} reuses "
            f"what is the same), or pass `overwrite=True` to replace the results",
            map(str, differing),
        )


def collect(file: BenchmarkFile, plans: Sequence[SeedPlan]) -> Results:
    """Results of the seeds that are done."""
    steps: dict[str, Step] = {}
    for plan in plans:
        steps |= {step.label: step for step in plan.all}
    records = {step.identity: step.work.record(step.path) for step in steps.values()}
    # By identity, since a step and a finished model may have one name.
    models: dict[tuple[str, int], ModelResult] = {}
    for plan in plans:
        for row in plan.rows:
            key = row.model.identity, plan.seed
            if key not in models:
                models[key] = model_cost(row.model, plan.seed, plan.not_counted, records)
    scored = []
    for table in file.tables:
        for plan in plans:
            for row in plan.rows:
                if row.table == table:
                    model = models[row.model.identity, plan.seed]
                    scored.append(_scored(row, plan.seed, model))
    step_records = []
    for step in steps.values():
        seconds = records[step.identity]["seconds"]
        step_records.append(StepRecord(name=step.label, command=step.shown, seconds=seconds))
    second_real = plans[0].second_real
    results = Results(
        name=file.name,
        split=file.scored_on,
        seeds=tuple(plan.seed for plan in plans),
        date=datetime.date.today().isoformat(),
        settings=file,
        machines=_machines(records.values()),
        real=read_result(plans[0].real.result),
        second_real=None if second_real is None else read_result(second_real.result),
        models=tuple(models.values()),
        scored=tuple(scored),
        same=tuple(_same(title, pair, plans) for title, pair in file.same.items()),
        steps=tuple(step_records),
        comparisons=(),
        seconds=round(sum(one["seconds"] for one in records.values()), 1),
    )
    changes: dict[str, Any] = {
        "comparisons": tuple(compare_rows(results)),
        "by_objective": tuple(compare_objective(results, _objectives(plans))),
    }
    if results.second_real is not None:
        changes["by_second"] = tuple(compare_rows(results, f"{SECOND}{results.decides}"))
    return results.model_copy(update=changes)


def _objectives(plans: Sequence[SeedPlan]) -> dict[str, HeldOutScores]:
    """Scores by the objective, by the labels of their steps."""
    found = {}
    for plan in plans:
        for row in plan.rows:
            if row.objective is not None and row.objective.label not in found:
                found[row.objective.label] = read_scores(row.objective.result)
    return found


def _machines(records: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The machines that did the steps, the one of most steps first."""
    by_hash: dict[str, dict[str, Any]] = {}
    steps = Counter[str]()
    for one in records:
        key = hash_of(one["machine"])
        by_hash[key] = one["machine"]
        steps[key] += 1
    return tuple(by_hash[key] for key, _ in steps.most_common())


def _scored(row: PlannedRow, seed: int, model: ModelResult) -> ScoredRow:
    evaluation = read_result(row.scores.result)
    tflop = None if model.training_flop is None else model.training_flop / 1e12
    use = read_json(row.samples.path / SAMPLING_FILE).get("expert_use", {})
    return ScoredRow(
        table=row.table,
        row=row.name,
        of=row.row,
        varied=dict(row.varied),
        model=row.model.name,
        model_hash=row.model.identity,
        seed=seed,
        command=row.samples.shown,
        samples=row.samples.path.name,
        evaluation=evaluation.model_copy(update={"training_tflop": tflop}),
        experts_a_step=use.get("experts_a_sample", 1.0),
        sampling_flop=row.samples.work.record(cost_path(row.samples))["image"],
        is_alone=row.is_alone,
        objective=_objective_scores(row),
        second=None if row.second is None else read_result(row.second.result),
    )


def _objective_scores(row: PlannedRow) -> ObjectiveScores | None:
    """Scores of a row by its objective; None in a benchmark without them."""
    if row.objective is None:
        return ObjectiveScores(why_none=row.why_unscored) if row.why_unscored else None
    return ObjectiveScores.of(row.objective.label, read_scores(row.objective.result))


def _same(title: str, names: tuple[str, str], plans: Sequence[SeedPlan]) -> SameImages:
    """Count the images that two sampled folders have in common, and those of equal pixels."""
    first, second = names
    images = equal = 0
    # Folders of no seed are the same in all plans.
    pairs = dict.fromkeys((plan.find(first).path, plan.find(second).path) for plan in plans)
    for one, other in pairs:
        for path in one.glob("*.png"):
            twin = other / path.name
            if twin.is_file():
                images += 1
                # Their files may differ: each says which model made it.
                equal += have_equal_pixels(path, twin)
    return SameImages(title=title, images=images, equal=equal)


def _write_text(path: Path, text: str) -> None:
    write_whole(path, lambda draft: draft.write_text(f"{text}\n", encoding="utf-8"))


def _write(out: Path, results: Results, headline: Callable[[Results], str] | None) -> None:
    texts = {RESULTS_FILE: results.model_dump_json(indent=1), "tables.md": tables_text(results)}
    for name, text in texts.items():
        _write_text(out / name, text)
    write_report(out, results, None if headline is None else headline(results))
