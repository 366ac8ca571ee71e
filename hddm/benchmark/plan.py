"""The plan of a benchmark for one training seed: each step as one command line, named by what it depends on.

A step's hash is that of its command line, in which the hash of a step stands for its folder and the content
of a file or folder for its path. So equal steps of rows, seeds and files are one, and are done once.

Operations of training and sampling are counted, a multiply-add being two:

    training = steps × (batch × one image's step + the optimiser's update) + calibration
    calibration = states that it looks at × one evaluation

Real steps of each network are counted, by running its command line for a few steps; only matrix products
count, as those of Muon's update. Sampling is counted on the first images of a row.
"""

import contextlib
import itertools
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hddm.benchmark.file import RESERVED, BenchmarkFile, Table
from hddm.calibration import LEVELS, STATES
from hddm.evaluation.features import find_inception
from hddm.experts.loading import load
from hddm.experts.records import ROUTER_FILE, read_router
from hddm.training.router import NOISED
from hddm.utils.errors import HddmError, did_you_mean, errors_as
from hddm.utils.files import read_json
from hddm.utils.progress import Progress, TrainingProgress, heard
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE
from hddm.utils.work import DONE, Work, content_of, hash_of
from hddm.velocity import VelocityField

RunCommand = Callable[[list[str]], None]
"""Runs a command line of hddm, without ``hddm``."""
NUMERICS = "3"
"""Part of every hash; raise it when verbs compute something else from the same options."""


class StepKind(NamedTuple):
    """What a benchmark knows of a verb of hddm."""

    is_seeded: bool = False
    """It gets ``--seed``, and continues with ``--resume`` after it was killed."""
    is_alone: bool = False
    """It writes one network, which has no strategy and no router."""
    is_training: bool = False
    """Its operations are counted."""
    is_uncounted: bool = False
    """The cost of what it trains, or of the model that it reads, is not known."""
    units: int = 1_000
    """Progress of a step; a training has one unit per image that it sees."""


STEP_KINDS = {
    "train expert": StepKind(is_seeded=True, is_alone=True, is_training=True),
    "train router": StepKind(is_seeded=True, is_training=True),
    "train all": StepKind(is_seeded=True, is_uncounted=True),
    "distill": StepKind(is_seeded=True, is_alone=True, is_training=True),
    "convert": StepKind(is_alone=True, is_uncounted=True),
    "calibrate": StepKind(is_alone=True),
    "merge": StepKind(is_alone=True),
    "sample": StepKind(is_seeded=True, units=10_000),
    "evaluate": StepKind(units=4_000),
    "data old-model": StepKind(is_uncounted=True),
}
"""Verbs that are not like any other."""
_ROUTED = ("strategy", "router_every")
_FREE = ("--device", "--threads", "--checkpoint-every", "--offload", "--max-memory")
"""Options that decide no result."""
_NAME = re.compile(r"\$([A-Za-z_][\w-]*)")
SCORES = ".json"
"""Ending of what ``hddm evaluate`` writes, which is a file."""


@dataclass(frozen=True)
class Step:
    """One command line, without ``--out``: ``words`` with ``$name`` for its ``inputs``, by name."""

    name: str
    verb: str
    words: tuple[str, ...]
    inputs: Mapping[str, "Step"]
    data: Path | None
    seed: int | None
    """The seed of this step or of one of its inputs."""
    work: Work

    @property
    def kind(self) -> StepKind:
        """What its verb does."""
        return STEP_KINDS.get(self.verb, StepKind())

    @property
    def options(self) -> list[list[str]]:
        """Its arguments one by one, and each option with its words."""
        return _grouped(self.words)

    @cached_property
    def identity(self) -> str:
        """SHA-256 of all that its result depends on."""
        places = {name: step.identity for name, step in self.inputs.items()}
        # The order of different options decides nothing.
        kept = sorted(self.options, key=lambda option: option[0] if option[0].startswith("--") else "")
        words = [word for option in kept if option[0] not in _FREE for word in option]
        return hash_of([NUMERICS, [self._identified(word, places) for word in words]])

    def _identified(self, word: str, places: Mapping[str, str]) -> str:
        if self.data is not None and "$data" in word:
            return content_of(Path(word.replace("$data", str(self.data))))
        if "$" not in word and "/" in word and Path(word).exists():
            return content_of(Path(word))
        return _placed(word, places)

    @cached_property
    def path(self) -> Path:
        """Where its result lies, ``$out`` in its words."""
        return self.work.path(self.verb.replace(" ", "-"), self.identity)

    @property
    def result(self) -> Path:
        """What it writes."""
        return self.path.with_name(self.path.name + SCORES) if self.verb == "evaluate" else self.path

    @property
    def written(self) -> dict[str, Path]:
        """Its outputs by label; an evaluation may write a second file."""
        found = {
            path.name.removeprefix(self.path.name): path
            for path in self.path.parent.glob(f"{self.path.name}*")
        }
        return {self.label + ending: path for ending, path in found.items() if ending != DONE}

    @property
    def is_done(self) -> bool:
        """True if its result exists."""
        return self.work.has(self.path)

    @property
    def label(self) -> str:
        """Its path in the output folder: ``seed_N/name``, or the name alone for seed 0 and without a seed."""
        return f"seed_{self.seed}/{self.name}" if self.seed else self.name

    def command(self, root: Path | None = None) -> list[str]:
        """Words to run it, with the links in ``root`` to its inputs; without, by names alone, its own too."""
        places = {name: str((root or Path()) / step.label) for name, step in self.inputs.items()}
        out = self.label if root is None else str(self.path)
        places |= {"out": out} | ({} if self.data is None else {"data": str(self.data)})
        ending = SCORES if self.verb == "evaluate" else ""
        return [*(_placed(word, places) for word in self.words), "--out", out + ending]

    @property
    def shown(self) -> str:
        """Its command line by names, to be run in a folder where those of its inputs were."""
        return f"hddm {shlex.join(self.command())}"

    def option(self, name: str) -> str | None:
        """Value of the option called ``--name``, if it has it."""
        return next((" ".join(one[1:]) for one in self.options if one[0] == f"--{name}"), None)

    @cached_property
    def upstream(self) -> list["Step"]:
        """This step and all steps that it depends on, each once, in the order in which they run."""
        found = {one.identity: one for step in self.inputs.values() for one in step.upstream}
        return [*found.values(), self]

    @cached_property
    def depth(self) -> int:
        """Number of steps that must be done before, in the longest chain."""
        return 1 + max((step.depth for step in self.inputs.values()), default=-1)


@dataclass(frozen=True)
class PlannedRow:
    """A row of a table: the model that is sampled, its samples, and their scores."""

    table: str
    name: str
    row: str
    """The row of the file that it is a variation of."""
    varied: Mapping[str, str]
    """Options of the table that it differs by."""
    model: Step
    samples: Step
    scores: Step


@dataclass
class SeedPlan:
    """All steps of one ``seed``, and the rows that they lead to."""

    file: BenchmarkFile
    seed: int
    work: Work
    data: Path | None = None

    def __post_init__(self) -> None:
        self.steps: dict[str, Step] = {}
        for name, line in self.file.steps.items():
            with errors_as(HddmError, f"step {name!r}"):
                self.steps[name] = self._step(name, self._words(line))

    @cached_property
    def real(self) -> Step:
        """The scores of real images of the split, which also train the classifier that measures samples."""
        images, features = getattr(self.file.evaluate, self.file.scored_on), self._features
        save = ["--save-classifier", "$out.safetensors"] if features == "classifier" else []
        with errors_as(HddmError, "evaluate"):
            words = ["evaluate", *self._words(images), *self._against, "--features", features, *save]
            return self._step("scores/real", words)

    @cached_property
    def rows(self) -> list[PlannedRow]:
        """Rows of all tables."""
        found = dict[str, PlannedRow]()
        for title, table in self.file.tables.items():
            for row, change in itertools.product(table.rows or self.file.rows, _changes(table)):
                with errors_as(HddmError, f"row {row!r}"):
                    made = self._row(title, row, change)
                    # A network alone has one row for all strategies.
                    other = found.setdefault(f"{title}/{made.samples.name}", made)
                    if other.samples.identity != made.samples.identity or made.samples.name == "samples/":
                        raise HddmError(f"{made.name!r} and {other.name!r} would share a folder; rename one")
        return list(found.values())

    @property
    def all(self) -> list[Step]:
        """All steps, each once; inputs come before the steps that need them."""
        ends = [*self.steps.values(), self.real, *(row.scores for row in self.rows)]
        found = {one.identity: one for end in ends for one in end.upstream}
        return list(found.values())

    def find(self, name: str) -> Step:
        """The step called ``name``; raises `HddmError` if there is none."""
        if name not in self.steps:
            raise HddmError(f"${name}: no such step or value above{did_you_mean(name, self.steps)}")
        return self.steps[name]

    def _model(self, source: str) -> Step:
        """The step that a row samples; a finished model's folder is one that is never run."""
        if (name := _NAME.fullmatch(source)) and name[1] not in RESERVED:
            return self.find(name[1])
        path = _placed(source, {"data": str(self.data)})
        return Step(path, "", (path,), {}, None, None, self.work)

    def _row(self, title: str, row: str, change: Mapping[str, str]) -> PlannedRow:
        """The row of a table that samples ``row`` with the options ``change``."""
        table = self.file.tables[title]
        source, *own = self._words(self.file.rows[row])
        model = self._model(source)
        is_one = model.kind.is_alone or (Path(model.name) / EXPERT_FILE).is_file()
        varied = {key: one for key, one in change.items() if not is_one or key not in _ROUTED}
        texts = [f"{one} steps" if key == "steps" else one for key, one in varied.items()]
        name = ", ".join([*([row] if len(table.rows or self.file.rows) > 1 or not texts else []), *texts])
        is_plain = title == next(iter(self.file.tables)) or not (varied or table.sample)
        place = slug(name if is_plain else f"{title} {name}")
        changed = [word for key, value in varied.items() for word in (f"--{key.replace('_', '-')}", value)]
        options = _merged(_merged(changed, self._words(table.sample)), own)
        samples = self._step(f"samples/{place}", ["sample", source, *options])
        by = "$real.safetensors" if self._features == "classifier" else self._features
        words = ["evaluate", "$samples", *self._against, "--features", by]
        scores = self._step(f"scores/{place}", words, {"samples": samples, "real": self.real})
        return PlannedRow(title, name, row, varied, model, samples, scores)

    @property
    def _features(self) -> str:
        chosen = self.file.evaluate.features
        if chosen == "auto":
            return "classifier" if find_inception() is None else "inception"
        return chosen

    @property
    def _against(self) -> list[str]:
        """Options of every evaluation."""
        measured, split = self.file.evaluate, self.file.scored_on
        words = ["--reference", *self._words(measured.reference)]
        words += [f"--{split.replace('_', '-')}", *self._words(getattr(measured, split))]
        for domain, classes in measured.domains.items():
            words += ["--domain", f"{domain}={classes}"]
        return [*words, *self._words(measured.options)]

    def _words(self, text: str) -> list[str]:
        """Words of a text, with the file's values."""
        values = {name: str(value) for name, value in self.file.values.items()}
        return shlex.split(_placed(text, values))

    def _step(self, name: str, words: Sequence[str], known: Mapping[str, Step] | None = None) -> Step:
        """The step of a command line whose names are in ``known`` or those of steps."""
        size = 2 if words[:1] in (["train"], ["data"]) else 1
        verb = " ".join(words[:size])
        words = [*words[:size], *_merged(words[size:], self._words(self.file.defaults.get(verb, "")))]
        if STEP_KINDS.get(verb, StepKind()).is_seeded and "--seed" not in words:
            words = [*words, "--seed", "$seed"]
        names = dict.fromkeys(found for word in words for found in _NAME.findall(word))
        if "data" in names and self.data is None:
            raise HddmError("$data: is the folder of your images; name it by `data`")
        inputs = {
            found: (known or {}).get(found) or self.find(found) for found in names if found not in RESERVED
        }
        is_seeded = "seed" in names or any(step.seed is not None for step in inputs.values())
        words = [_placed(word, {"seed": str(self.seed)}) for word in words]
        return Step(name, verb, tuple(words), inputs, self.data, self.seed if is_seeded else None, self.work)


def _placed(word: str, places: Mapping[str, str]) -> str:
    """``word`` with ``places`` for its names; others stay."""
    return _NAME.sub(lambda found: places.get(found[1], found[0]), word)


def slug(name: str) -> str:
    """A row's name as part of a path."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _grouped(words: Sequence[str]) -> list[list[str]]:
    """Arguments one by one, and each option with the words up to the next."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups or not groups[-1][0].startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return groups


def _merged(own: Sequence[str], defaults: Sequence[str]) -> list[str]:
    """``own`` words, and the options in ``defaults`` that they do not have."""
    present = {group[0].replace("--no-", "--") for group in _grouped(own)}
    further = [group for group in _grouped(defaults) if group[0].replace("--no-", "--") not in present]
    return [*own, *(word for group in further for word in group)]


def _changes(table: Table) -> list[dict[str, str]]:
    """What is varied in each row of a table: values by option."""
    changes: list[dict[str, str]] = [{}]
    if table.product:
        for key, values in table.vary.items():
            changes = [change | {key: str(value)} for change in changes for value in values]
    elif table.vary:
        varied = [{key: str(value)} for key, values in table.vary.items() for value in values]
        changes = varied if len(table.vary) == 1 else [{}, *varied]
    return changes


IMAGES = 32
"""Images of a row that are sampled to count operations."""
_STEPS = 3
# Late enough for a calibration to take part.
_TIME = 0.75
# Counted in float32 on the CPU, so that the count is the same everywhere.
_PLAIN = "--device cpu --threads 1 --mixed-precision no --gradient-accumulation-steps 1"


@contextlib.contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Count floating-point operations within the block."""
    # The fused attention kernels for the CPU have no entry in torch's counter.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


def evaluation_flop(field: VelocityField, **conditions: Tensor) -> int:
    """Count one velocity of one image, with the expert's calibration and without guidance."""
    assert field.sample_shape is not None
    x = torch.zeros(1, *field.sample_shape, device=field.device)
    t = torch.full((1,), _TIME, dtype=torch.float64, device=field.device)
    return forward_flop(field.velocity, x, t, **conditions)


@torch.no_grad()
def forward_flop(function: Callable[..., object], x: Tensor, t: Tensor, **conditions: Tensor) -> int:
    """Count one call of a network or of a function like one."""
    with counting() as counter:
        function(x, t, **conditions)
    return int(counter.get_total_flops())


class _Enough(Exception):
    """Raised to end a training after some steps."""


def count_training(words: Sequence[str], run: RunCommand) -> tuple[int, int]:
    """Count a training step of a command line: one image's part, and the part of any batch."""
    one, two = (_count_batch(words, run, size) for size in (1, 2))
    return two - one, 2 * one - two


def _count_batch(words: Sequence[str], run: RunCommand, batch_size: int) -> int:
    """Count one step, forward, backward and update.

    Work that is done once before the first step, such as taking moments, does not count.
    """
    totals: list[int] = []

    def hear(part: float) -> None:
        if isinstance(Progress.opened[-1], TrainingProgress):
            totals.append(counter.get_total_flops())
            if len(totals) == _STEPS:
                raise _Enough

    length = ["--steps", str(_STEPS + 1), "--batch-size", str(batch_size)]
    if "--sampling-steps" in words:
        # Drawn before the first step.
        length += ["--trajectories", "16"]
    enough = contextlib.suppress(_Enough)
    with tempfile.TemporaryDirectory() as folder, heard(hear), counting() as counter, enough:
        run([*words, *_PLAIN.split(), *length, "--out", f"{folder}/out"])
    return totals[-1] - totals[-2]


def count_sampling(words: Sequence[str], run: RunCommand) -> int:
    """Count the operations of one image of a ``hddm sample``, over its first `IMAGES`."""
    size = ["--num-images", str(IMAGES), "--batch-size", str(IMAGES), "--device", "cpu"]
    with tempfile.TemporaryDirectory() as folder, counting() as counter:
        run([*words, *size, "--out", f"{folder}/out"])
    return counter.get_total_flops() // IMAGES


def cost_key(step: Step) -> str:
    """Hash of what the counted operations of an image depend on: options and networks, but no seed."""
    kept = (word for option in step.options if option[0] != "--seed" for word in option)
    # Whatever the names of its inputs.
    words = ["$" if "$" in word else word for word in kept]
    return hash_of(["cost", words, [_shape_of(one.path) for one in step.inputs.values()]])


def _shape_of(path: Path) -> Any:
    """What decides the cost of a shard, an expert or an ensemble; equal networks cost the same."""
    configs = [read_json(one) for one in sorted(path.rglob("config.json"))]
    ensemble = path / ENSEMBLE_FILE
    strategy = read_json(ensemble)["strategy"] if ensemble.is_file() else None
    # Students of few steps take as many as they were trained for.
    steps = [read_json(one).get("sampling_steps") for one in sorted(path.rglob(EXPERT_FILE))]
    return [configs, strategy, steps] if configs else path.name


def trained_size(step: Step) -> tuple[int, int]:
    """Steps and batch size of a finished training, as its record says; none of a calibration."""
    if not step.kind.is_training:
        return 0, 0
    record = step.path / (ROUTER_FILE if step.verb == "train router" else EXPERT_FILE)
    found = read_json(record)["training"]
    return found["steps"], found["batch_size"]


def calibration_flop(step: Step) -> int:
    """Count the calibration that ends a finished training or that is one; 0 where there was none."""
    if step.verb == "train router":
        if "--calibrate" not in step.words:
            return 0
        network, _ = read_router(step.path)
        side = network.config.sample_size
        x = torch.zeros(1, network.config.in_channels, side, side)
        return NOISED * forward_flop(network, x, torch.ones(1))
    # A calibration that was trained in was not fitted afterwards.
    if read_json(step.path / EXPERT_FILE).get("training_calibration"):
        return 0
    field = load(step.path)
    assert isinstance(field, VelocityField)
    field.calibration = None
    labels = {"class_labels": torch.zeros(1, dtype=torch.long)} if field.classes else {}
    return LEVELS * STATES * evaluation_flop(field, **labels)
