"""The plan of a benchmark for one training seed: each step as one command line, named by what it depends on.

A step's hash is that of its command line, in which the hash of a step stands for its folder and the content
of a file or folder for its path. So equal steps of rows, seeds and files are one, and are done once.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hddm.benchmark.file import RESERVED, BenchmarkFile, Table
from hddm.evaluation.features import INCEPTION
from hddm.utils.errors import HddmError, asked, did_you_mean
from hddm.utils.records import EXPERT_FILE
from hddm.utils.work import DONE, Work, content_of, hash_of

NUMERICS = "3"
"""Part of every hash; raise it when verbs compute something else from the same options."""
SEEDED = ("train expert", "train router", "train all", "distill", "sample")
"""Verbs that get ``--seed``, and continue with ``--resume`` after they were killed."""
_ALONE = ("train expert", "distill", "convert", "calibrate", "merge")
"""Verbs that write one network, which has no strategy and no router."""
_ROUTED = ("strategy", "router_every", "router_temperature")
_FREE = ("--device", "--threads", "--fsdp", "--checkpoint-every", "--offload", "--max-memory")
"""Options that decide no result."""
_PAIRED = ("train", "data")
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
    """The seed that it depends on, itself or by an input."""
    work: Work

    @property
    def options(self) -> list[list[str]]:
        """Its arguments one by one, and each option with its words."""
        return list(_grouped(self.words))

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
        """All that it has written by names, as `label`; an evaluation may write a second file."""
        found = {
            path.name.removeprefix(self.path.name): path
            for path in self.path.parent.glob(f"{self.path.name}*")
        }
        return {self.label + ending: path for ending, path in found.items() if ending != DONE}

    @property
    def is_done(self) -> bool:
        """True if it needs not be done again."""
        return self.work.has(self.path)

    @property
    def label(self) -> str:
        """Its name in folders: those of one seed lie together, of seed 0 with what no seed decides."""
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
        """This step and all that it depends on, each once, the first first."""
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
            with asked(f"step {name!r}", HddmError):
                self.steps[name] = self._step(name, self._words(line))

    @cached_property
    def real(self) -> Step:
        """The scores of real images of the split, which also train the classifier that measures samples."""
        images, features = getattr(self.file.evaluate, self.file.scored_on), self._features
        save = ["--save-classifier", "$out.safetensors"] if features == "classifier" else []
        with asked("evaluate", HddmError):
            words = ["evaluate", *self._words(images), *self._against, "--features", features, *save]
            return self._step("scores/real", words)

    @cached_property
    def rows(self) -> list[PlannedRow]:
        """Rows of all tables."""
        found, first = dict[str, PlannedRow](), next(iter(self.file.tables))
        for title, table in self.file.tables.items():
            named = table.rows or tuple(self.file.rows)
            for row, change in ((row, change) for row in named for change in _changes(table)):
                with asked(f"row {row!r}", HddmError):
                    model = self._model(self._words(self.file.rows[row])[:1])
                    is_one = model.verb in _ALONE or (Path(model.name) / EXPERT_FILE).is_file()
                    varied = {key: one for key, one in change.items() if not is_one or key not in _ROUTED}
                    texts = [f"{one} steps" if key == "steps" else one for key, one in varied.items()]
                    name = ", ".join([*([row] if len(named) > 1 or not texts else []), *texts])
                    is_plain = title == first or not (varied or table.sample)
                    place = slug(name if is_plain else f"{title} {name}")
                    made = self._row(title, name, row, varied, model, place)
                    # A network alone has one row for all strategies.
                    other = found.setdefault(f"{title}/{place}", made)
                    if not place or other.samples.identity != made.samples.identity:
                        raise HddmError(f"{name!r} and {other.name!r} would share a folder; rename one")
        return list(found.values())

    @property
    def all(self) -> list[Step]:
        """All steps, each once, those that others need first."""
        ends = [*self.steps.values(), self.real, *(row.scores for row in self.rows)]
        found = {one.identity: one for end in ends for one in end.upstream}
        return list(found.values())

    def find(self, name: str) -> Step:
        """The step called ``name``; raises `HddmError` if there is none."""
        if name not in self.steps:
            raise HddmError(f"${name}: no such step or value above{did_you_mean(name, self.steps)}")
        return self.steps[name]

    def _model(self, words: Sequence[str]) -> Step:
        """The step that a row samples; a finished model's folder is one that is never run."""
        source = words[0] if words else "-"
        if (name := _NAME.fullmatch(source)) and name[1] not in RESERVED:
            return self.find(name[1])
        if source.startswith("-"):
            raise HddmError("must begin with what is sampled: a step, as $expert, or the folder of a model")
        path = _placed(source, {"data": str(self.data)})
        return Step(path, "", (path,), {}, None, None, self.work)

    def _row(
        self, table: str, name: str, row: str, varied: Mapping[str, str], model: Step, place: str
    ) -> PlannedRow:
        source, *own = self._words(self.file.rows[row])
        changed = [word for key, value in varied.items() for word in (f"--{key.replace('_', '-')}", value)]
        options = _merged(_merged(changed, self._words(self.file.tables[table].sample)), own)
        samples = self._step(f"samples/{place}", ["sample", source, *options])
        by = "$real.safetensors" if self._features == "classifier" else self._features
        words = ["evaluate", "$samples", *self._against, "--features", by]
        scores = self._step(f"scores/{place}", words, {"samples": samples, "real": self.real})
        return PlannedRow(table, name, row, varied, model, samples, scores)

    @property
    def _features(self) -> str:
        chosen = self.file.evaluate.features
        if chosen == "auto":
            return "classifier" if INCEPTION.find() is None else "inception"
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
        size = 2 if words[:1] and words[0] in _PAIRED else 1
        verb = " ".join(words[:size])
        words = [*words[:size], *_merged(words[size:], self._words(self.file.defaults.get(verb, "")))]
        if verb in SEEDED and "--seed" not in words:
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


def _grouped(words: Sequence[str]) -> Iterator[list[str]]:
    """Arguments one by one, and each option with the words up to the next."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") or not group or not group[0].startswith("--"):
            if group:
                yield group
            group = []
        group.append(word)
    if group:
        yield group


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
