"""Students of one, two and four steps of a mixed and of a grown ensemble, against 30 steps of their teachers.

python -m benchmarks.distillation.few_steps. The grown ensemble is three experts and a fourth, begun as one of
them, for a domain that they have not seen.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.distillation.measure import Bench, distill_job
from benchmarks.distillation.settings import FULL, QUICK
from benchmarks.distillation.settings import Settings as Teachers
from benchmarks.harness import Start, as_json, check_kept, expert_call, run_calls, run_over_seeds
from benchmarks.reports import SIDES, Runs, figure, score_cells, table
from hddm.experts.assembly import assemble
from hddm.experts.loading import load
from hddm.experts.records import EXPERT_FILE
from hddm.sampling import sample
from hddm.training.mean_flow import STUDENT_STEPS
from hddm.training.settings import DistillSettings
from hddm.utils.files import read_json
from hddm.utils.processes import Call, Workers

TEACHER_STEPS, GOAL = 30, 1.3
KINDS = {"mixed": "two DDPM and two flow experts", "grown": "three experts and a new one for a new domain"}
TIMED_IMAGES, REPEATS = 512, 5


@dataclass(frozen=True)
class Settings:
    """Of the benchmark; ``steps`` and ``trajectories`` are a student's."""

    teachers: Teachers = FULL
    steps: int = 3200
    batch_size: int = 128
    learning_rate: float = 8e-3
    trajectories: int = 8192
    timed_images: int = TIMED_IMAGES
    name: str = "digits"

    @property
    def content(self) -> dict[str, Any]:
        """All settings as JSON gives them back."""
        return {
            **as_json(self.teachers),
            **{key: one for key, one in vars(self).items() if key != "teachers"},
        }

    def student(self, steps: int, seed: int) -> DistillSettings:
        """The training of a student of so many steps."""
        asked = {
            "steps": self.steps,
            "batch_size": self.batch_size,
            "optimizer": "adamw",
            "learning_rate": self.learning_rate,
            "ema_decay": 0.99,
            "teacher": "routed",
            "sampling_steps": steps,
            "trajectories": self.trajectories,
            "seed": seed,
        }
        return DistillSettings.model_validate(asked)


def teachers(bench: Bench, seed: int) -> dict[str, tuple[Path, Path]]:
    """The mixed and the grown ensemble of a training seed, each with the expert that a student begins as."""
    drawn = bench.teacher(seed)
    place, last = drawn.parent, bench.settings.num_shards - 1
    experts = [place / "experts" / str(k) for k in range(last + 1)]
    new, own = place / "experts" / "new", bench.settings.quickstart.expert("flow", seed)
    settings = own.model_copy(update={"prediction": None, "rotary": None, "weak_at": 0.0})
    call = expert_call(bench.shards / f"shard_{last}", new, settings, _flow_of(experts[:last]))
    run_calls(bench.pool, [call], f"seed {seed}: grow")
    found = {"mixed": (experts, place / "router"), "grown": ([*experts[:last], new], "moments")}
    for name, (parts, router) in found.items():
        if not (place / name).exists():
            assemble(parts, place / name, router, "full")
    return {"mixed": (place / "mixed", experts[last]), "grown": (place / "grown", new)}


def _flow_of(experts: Sequence[Path]) -> Path | None:
    """The last of these experts that is a flow expert; None without one."""
    flows = (one for one in reversed(experts) if read_json(one / EXPERT_FILE)["objective"] == "flow")
    return next(flows, None)


def measure(settings: Settings, start: Start) -> Path:
    """The whole benchmark; returns the Markdown file."""
    folder = start.work / settings.name
    check_kept(folder, settings.content)
    runs = []
    with Workers(start.workers) as pool:
        bench = Bench(settings.teachers, folder, pool)
        for seed in range(start.seeds):
            run: dict[str, Any] = {"seed": seed, "rows": {}}
            for kind, (teacher, init) in teachers(bench, seed).items():
                place = folder / f"seed_{seed}" / f"students-{kind}"
                outs = {n: place / str(n) for n in STUDENT_STEPS}
                calls = [
                    Call(
                        distill_job,
                        {"ensemble": teacher, "shards": bench.shards, "out": out, "init": init}
                        | {"settings": settings.student(n, seed)},
                        settings.steps,
                    )
                    for n, out in outs.items()
                ]
                run_calls(pool, calls, f"seed {seed}: students of the {kind} ensemble")
                models: dict[str, tuple[Path, Mapping[str, Any]]] = {
                    _row(kind, "full"): (teacher, {"strategy": "full", "steps": TEACHER_STEPS}),
                    _row(kind, "draw"): (teacher, {"strategy": "draw", "steps": TEACHER_STEPS}),
                    **{_row(kind, n): (out, {"steps": n, "solver": "euler"}) for n, out in outs.items()},
                }
                run["rows"] |= bench.scores(place / "rows", models, seed, f"seed {seed}: sample {kind}")
            runs.append(run)
    times = {kind: _times(settings, folder / "seed_0", kind) for kind in KINDS}
    content = {"settings": settings.content, "runs": runs, "seconds": times}
    return start.write(f"few-steps-{settings.name}", lines(settings, content), content)


def _row(kind: str, of: str | int) -> str:
    if isinstance(of, int):
        return f"{kind}: student, {of} step{'s' if of > 1 else ''}"
    return f"{kind}: teacher, {of}, {TEACHER_STEPS} steps"


def _times(settings: Settings, place: Path, kind: str) -> dict[str, list[float]]:
    """Seconds for images by the teacher and by its students, in turn."""
    teacher = load(place / kind)
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        _row(kind, strategy): (teacher, {"steps": TEACHER_STEPS, "strategy": strategy})
        for strategy in ("full", "draw")
    }
    ways |= {_row(kind, n): (load(place / f"students-{kind}" / str(n)), {}) for n in STUDENT_STEPS}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, (model, how) in ways.items():
            begun = time.perf_counter()
            sample(model, settings.timed_images, batch_size=256, **how)
            # The first round warms up.
            if repeat:
                found[name].append(time.perf_counter() - begun)
    return found


def lines(settings: Settings, content: Mapping[str, Any]) -> list[str]:
    """The report, its title first."""
    runs, parts = content["runs"], list[str]()
    images = settings.teachers.quickstart.sampling.num_images
    for kind, what in KINDS.items():
        teacher = _row(kind, "full")
        body = []
        for of in ("full", "draw", *STUDENT_STEPS):
            row, seconds = _row(kind, of), content["seconds"][kind]
            shares = [one / whole for one, whole in zip(seconds[row], seconds[teacher], strict=True)]
            ratio = "1" if row == teacher else _ratio(runs, row, teacher)
            share = f"{min(shares):.3f} to {max(shares):.3f}"
            body.append([row.removeprefix(f"{kind}: "), *score_cells(runs, row), ratio, share])
        head = [
            "model",
            *SIDES.values(),
            "diversity",
            "nearest-image ratio",
            "held-out, of the teacher's",
            "time",
        ]
        parts += [f"## {kind.capitalize()}: {what}", "", *table(head, body), ""]
    return [
        "# Students of few steps, on digits",
        f"The quickstart's digits, experts, router and scores. Students begin as one of the flow experts and "
        f"learn from {settings.trajectories:,} trajectories of the mixture (`full`) in {settings.steps:,} "
        f"steps of {settings.batch_size}. Distances are of {images:,} images, over trainings; the goal is "
        f"{GOAL:g} times the teacher's distance to held-out images in two steps. Times are shares of the "
        f"mixture's, {REPEATS} rounds of {settings.timed_images} images in turn, with "
        f"{torch.get_num_threads()} threads.",
        "",
        *parts,
    ]


def _ratio(runs: Runs, row: str, teacher: str) -> str:
    rows = [run["rows"] for run in runs]
    return figure(
        [one[row]["to_held_out"]["value"] / one[teacher]["to_held_out"]["value"] for one in rows]
    ).to(2)


SHORT = Settings(
    QUICK, steps=8, batch_size=8, learning_rate=1e-3, trajectories=16, timed_images=4, name="digits-quick"
)


if __name__ == "__main__":
    torch.set_num_threads(2)
    run_over_seeds("few-steps", measure, Settings(), SHORT, __doc__)
