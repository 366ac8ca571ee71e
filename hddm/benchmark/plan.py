"""The plan of a benchmark for one training seed: the steps of its file, and the rows that they lead to."""

import itertools
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from hddm.benchmark.file import OF_SOLVER, RESERVED, ROUTING, BenchmarkFile, DecidingSplit, Table
from hddm.benchmark.lines import CommandLine, Line, Settings, names_in, placed, split
from hddm.benchmark.models import EXPERTS, Models, why_not_scored
from hddm.benchmark.steps import STEP_KINDS, Contents, Step, StepKind
from hddm.data.shard_records import HELD_OUT
from hddm.evaluation.feature_names import find_inception, refuse_absent, refuse_unknown
from hddm.sampling_choices import refuse_beside_native
from hddm.settings import ObjectiveSettings
from hddm.utils.errors import HddmError, did_you_mean, errors_as
from hddm.utils.files import read_yaml
from hddm.utils.work import Work

_REAL = "real"
_SHARD = re.compile(r"shard_(\d+)")
_NOT_BY_SECOND = frozenset({"domain", "brief", "save_classifier", "allow_few"})
"""Options of evaluations that those by the second features do not share.

They measure no domains, which need a classifier, and always have the kernel distance, which is fair for few
images. So they accept few images too.
"""
_LONGEST = 80
"""Letters of a row's name in a path."""


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
    is_alone: bool
    """The model is one network, or several between which nothing has to choose."""
    samples: Step
    scores: Step
    objective: Step | None = None
    """Scores of the model by its objective, which rows that are sampled otherwise may share."""
    why_unscored: str = ""
    """Why there are none, in a benchmark that has them."""
    second: Step | None = None
    """Scores of the same samples by the second features."""


@dataclass
class SeedPlan:
    """All steps of one ``seed``, and the rows that they lead to.

    ``lines`` parses command lines; ``data`` is the user's folder. Plans of one benchmark share ``contents``.
    """

    file: BenchmarkFile
    seed: int
    work: Work
    lines: CommandLine
    data: Path | None = None
    contents: Contents = field(default_factory=Contents)

    def __post_init__(self) -> None:
        self.steps: dict[str, Step] = {}
        self.models = Models()
        self._places: dict[str, Line] = {}
        self._objectives: dict[str, tuple[Line, Step]] = {}
        self._defaults: dict[str, Line] = {}
        for verb, text in self.file.defaults.items():
            line = self._options(f"defaults of {verb}", verb, split(self._with_values(text)))
            if line.verb != verb:
                raise HddmError(f"defaults of {verb!r}: name the verb alone, as {line.verb!r}")
            self._defaults[verb] = line
        for name, text in self.file.steps.items():
            with errors_as(HddmError, f"step {name!r}"):
                line = self.lines.read(split(self._with_values(text)))
                self.steps[name] = self._step(name, self._with_defaults(line))
                self.models.add(self.steps[name])

    @property
    def real(self) -> Step:
        """The scores of real images of the split, which also train the classifier that measures samples."""
        return self.splits[self.file.scored_on]

    @cached_property
    def splits(self) -> dict[DecidingSplit, Step]:
        """Scores of real images of the validation and the held-out split, where the file names them.

        Only those of the split that decides are ever measured. The other one is planned all the same, so that
        it is checked before anything runs.
        """
        found: dict[DecidingSplit, Step] = {}
        for name in get_args(DecidingSplit):
            text = getattr(self.file.evaluate, name)
            if text is not None:
                with errors_as(HddmError, "evaluate"):
                    images = split(self._with_values(text))
                    if len(images) != 1:
                        raise HddmError(f"{name}: {text!r} is no path of images; name one")
                    words = [*images, "--features", self._features]
                    if self._features == "classifier":
                        words += ["--save-classifier", "$out.safetensors"]
                    found[name] = self._step(f"scores/{_REAL}", self._evaluation(words, name))
        return found

    @cached_property
    def second_real(self) -> Step | None:
        """Scores of real images of the split that decides by the second features, if the file names some."""
        if self.file.evaluate.second_features is None:
            return None
        with errors_as(HddmError, "evaluate.second_features"):
            return self._second(_REAL, str(self.real.line.given["images"][0]), {})

    def _second(self, place: str, images: str, known: Mapping[str, Step]) -> Step:
        """The step that scores ``images`` by the second features."""
        by = self.file.evaluate.second_features
        assert by is not None
        line = self._evaluation([images, "--features", by], self.file.scored_on)
        few = Line("evaluate", {"allow_few": ("--allow-few",)})
        return self._step(
            f"scores/second/{place}", line.without(_NOT_BY_SECOND).or_else(few), known
        )

    @cached_property
    def rows(self) -> list[PlannedRow]:
        """Rows of all tables."""
        found = dict[tuple[str, str], PlannedRow]()
        for title, table in self.file.tables.items():
            for row, change in itertools.product(table.rows or self.file.rows, _changes(table)):
                with errors_as(HddmError, f"row {row!r}"):
                    made = self._row(title, row, change)
                    # A network alone has one row for all strategies.
                    other = found.setdefault((title, made.name), made)
                    if other.samples.line != made.samples.line:
                        raise HddmError(
                            f"table {title!r} has two rows called {made.name!r}; rename one"
                        )
        return list(found.values())

    @cached_property
    def all(self) -> list[Step]:
        """All steps, inputs before the steps that need them; equal ones come once for each of their names."""
        found = {step.label: step for step in (*self.steps.values(), self.real)}
        if self.second_real is not None:
            found[self.second_real.label] = self.second_real
        for row in self.rows:
            for step in (row.samples, row.scores, row.second, row.objective):
                if step is not None:
                    found[step.label] = step
        return sorted(found.values(), key=lambda step: step.depth)

    @property
    def not_counted(self) -> list[Step]:
        """Steps that the file leaves out of costs, with all before them."""
        return [self.steps[name] for name in self.file.not_counted]

    def check(self) -> None:
        """Plan all rows, and refuse what could only fail once work was done."""
        for name in names_in(str(self.data)):
            if name in self.steps:
                text = f"is also the name of a step, ${name}; rename the step or the folder"
                raise HddmError(f"`data` {self.data}: {text}")
        for step in self.splits.values():
            with errors_as(HddmError, "evaluate"):
                _refuse_unready(step)
        for step in self.all:
            with errors_as(HddmError, f"step {step.name!r}"):
                _refuse_unready(step)
        for name in self.file.compare.varies:
            known = self.rows[0].samples.values
            if name not in known:
                raise HddmError(
                    f"compare.varies: {name!r} is no option of hddm sample{did_you_mean(name, known)}"
                )
        for title, names in self.file.same.items():
            with errors_as(HddmError, f"same {title!r}"):
                for name in names:
                    if self.find(name).verb != "sample":
                        raise HddmError(
                            f"${name} is no step that samples; name two folders of samples"
                        )

    def find(self, name: str) -> Step:
        """The step called ``name``; raises `HddmError` if there is none."""
        if name not in self.steps:
            raise HddmError(f"${name}: no such step or value above{did_you_mean(name, self.steps)}")
        return self.steps[name]

    def _model(self, source: str) -> Step:
        """The step that a row samples; a finished model's folder is one that is never run."""
        names = names_in(source)
        if names and source == f"${names[0]}" and names[0] not in RESERVED:
            return self.find(names[0])
        inputs = {name: self.find(name) for name in names if name not in RESERVED}
        path = placed(source, {"data": str(self.data), "seed": str(self.seed)})
        settings = Settings({"source": Path(path)}, frozenset({"source"}))
        seed = next((step.seed for step in inputs.values() if step.seed is not None), None)
        return Step(path, Line("", {}), settings, inputs, seed, self.work, self.data, self.contents)

    def _row(self, title: str, row: str, change: Mapping[str, str]) -> PlannedRow:
        """The row of a table that samples ``row`` with the options ``change``."""
        table = self.file.tables[title]
        own = self.lines.read(["sample", *split(self._with_values(self.file.rows[row]))])
        if "source" not in own.given:
            raise HddmError("names no model; write $NAME of a step, or a folder")
        (source,) = own.given["source"]
        model = self._model(source)
        is_alone = self._is_alone(own)
        varied = {}
        texts = []
        for key, value in change.items():
            if not is_alone or key not in ROUTING:
                varied[key] = value
                texts.append(f"{value} steps" if key == "steps" else value)
        if len(table.rows or self.file.rows) > 1 or not texts:
            texts.insert(0, row)
        name = ", ".join(texts)
        is_plain = title == next(iter(self.file.tables)) or not (varied or table.sample)
        options = self._options(f"tables.{title}", "sample", split(self._with_values(table.sample)))
        if is_alone:
            options = options.without(ROUTING)
        # What is nearer to the row decides whether it has a solver or a sampler of the experts' own kind.
        if "native" in varied or ("native" in own.given and "native" not in options.given):
            options = options.without(OF_SOLVER)
        if "native" in varied or "native" in options.given:
            own = own.without(OF_SOLVER)
        changed = self._options(f"tables.{title}", "sample", _words_of(varied))
        line = self._with_defaults(changed.or_else(options).or_else(own))
        samples = self._step("samples/", line)
        if samples.values["output_type"] == "latent":
            raise HddmError("`output_type` latent: only pictures are scored; leave it out")
        place = self._place(name if is_plain else f"{title} {name}", line)
        samples = replace(samples, name=f"samples/{place}")
        by = f"${_REAL}.safetensors" if self._features == "classifier" else self._features
        known = {"samples": samples, _REAL: self.real}
        evaluation = self._evaluation(["$samples", "--features", by], self.file.scored_on)
        scores = self._step(f"scores/{place}", evaluation, known)
        planned = PlannedRow(title, name, row, varied, model, is_alone, samples, scores)
        if self.file.evaluate.second_features is not None:
            planned = replace(planned, second=self._second(place, "$samples", {"samples": samples}))
        if self.file.evaluate.objective is False:
            return planned
        why = why_not_scored(samples.values, self.models.of(model), self._measures_likelihood)
        if why:
            return replace(planned, why_unscored=why)
        return replace(planned, objective=self._objective(row, source, samples, model))

    def _objective(self, row: str, source: str, samples: Step, model: Step) -> Step:
        """The step that scores what a row samples by its objective; equal ones are one step."""
        known = self.models.of(model)
        expert, strategy = samples.values["expert"], samples.values["strategy"]
        if strategy is None and expert is None and known is not None and not known.is_alone:
            strategy = known.strategy
        name = row
        if expert is not None and (known is None or len(known.experts) > 1):
            source = f"{source}/{EXPERTS}/{expert}"
            name += f" expert {expert}"
        words = [source]
        if strategy is not None:
            words += ["--strategy", strategy]
            name += f" {strategy}"
        measured = self.file.evaluate
        images = split(self._with_values(getattr(measured, self.file.scored_on)))
        line = self.lines.read(["evaluate", *words, "--held-out", *images])
        if isinstance(measured.objective, str):
            line = line.or_else(self._objective_options(measured.objective))
        for other, step in self._objectives.values():
            if other == line:
                return step
        numbers = itertools.count(2)
        first = place = slug(name) or "row"
        while place in self._objectives:
            place = f"{first}-{next(numbers)}"
        self._objectives[place] = line, self._step(f"objective/{place}", line)
        return self._objectives[place][1]

    @cached_property
    def _measures_likelihood(self) -> bool:
        """False where ``evaluate.objective`` leaves bits out."""
        text = self.file.evaluate.objective
        options = self._objective_options(text) if isinstance(text, str) else Line("evaluate", {})
        _, images = options.given.get("likelihood_images", ("", None))
        # What is no number is refused where the line is read.
        return images is None or not images.isdecimal() or int(images) > 0

    def _objective_options(self, text: str) -> Line:
        """Options of all scores by the objective."""
        where = "evaluate.objective"
        options = self._options(where, "evaluate", split(self._with_values(text)))
        known = ObjectiveSettings.model_fields.keys() - {"strategies"}
        for name in options.given:
            if name not in known:
                listed = ", ".join(f"--{one.replace('_', '-')}" for one in sorted(known))
                shown = options.given[name][0]
                raise HddmError(f"{where}: {shown}: cannot be chosen here; choose from {listed}")
        return options

    def _place(self, name: str, line: Line) -> str:
        """Part of a path for a row, which no other samples of the plan have."""
        first = slug(name) or "row"
        numbers = itertools.count(2)
        place = first
        # Two names may have one slug, and equal rows of two tables share their samples. Lines are compared
        # with $seed in them, so that a row has one place in the plans of all seeds.
        while place == _REAL or self._places.setdefault(place, line) != line:
            place = f"{first}-{next(numbers)}"
        return place

    @property
    def _features(self) -> str:
        chosen = self.file.evaluate.features
        if chosen == "auto":
            return "classifier" if find_inception() is None else "inception"
        return chosen

    def _evaluation(self, words: Sequence[str], split_name: DecidingSplit) -> Line:
        """The whole line of an evaluation on a split, with the options of every one."""
        measured = self.file.evaluate
        words = ["evaluate", *words, "--reference", *split(self._with_values(measured.reference))]
        against = self._with_values(getattr(measured, split_name))
        words += [f"--{split_name.replace('_', '-')}", *split(against)]
        for domain, classes in measured.domains.items():
            words += ["--domain", f"{domain}={classes}"]
        line = self.lines.read(words)
        further = self._options(
            "evaluate.options", "evaluate", split(self._with_values(measured.options))
        )
        for name in further.given:
            if name in line.given or name in ("held_out", "validation"):
                raise HddmError(
                    f"evaluate.options: --{name.replace('_', '-')}: has a key of its own in `evaluate`"
                )
        return self._with_defaults(line.or_else(further))

    def _with_values(self, text: str) -> str:
        """A text with the file's values."""
        return placed(text, {name: str(value) for name, value in self.file.values.items()})

    def _options(self, where: str, verb: str, words: Sequence[str]) -> Line:
        """A line of options alone, from a key of the file."""
        with errors_as(HddmError, where):
            line = self.lines.read([*verb.split(), *words])
            for group in line.given.values():
                if not group[0].startswith("--"):
                    raise HddmError(f"{group[0]}: is no option; only options can stand here")
        return line

    def _step(self, name: str, line: Line, known: Mapping[str, Step] | None = None) -> Step:
        """The step of a whole line, whose names are in ``known`` or those of steps."""
        # A dictionary, since the order counts.
        names: dict[str, None] = {}
        for word in line.words:
            names |= dict.fromkeys(names_in(word))
        self._refuse_missing_data(names)
        inputs = {}
        for found in names:
            if found not in RESERVED:
                inputs[found] = (known or {}).get(found) or self.find(found)
        is_seeded = "seed" in names or any(step.seed is not None for step in inputs.values())
        line = line.placed({"seed": str(self.seed)})
        for word in line.words:
            _refuse_outside(word, inputs)
        settings = self.lines.settings(line.placed({"data": str(self.data)}))
        seed = self.seed if is_seeded else None
        step = Step(name, line, settings, inputs, seed, self.work, self.data, self.contents)
        for _, path in step.paths:
            _refuse_missing_shard(step, path)
        if step.verb == "sample":
            native = step.values["native"]
            if native is not None:
                refuse_beside_native(native, {name: step.values[name] for name in OF_SOLVER})
            sampled = self.models.at(step, step.values["source"])
            if sampled is not None:
                sampled.check(step.values["strategy"], step.values["expert"], native)
        # Computed here, where those of its inputs are known: a chain may be long.
        _ = step.depth, step.upstream
        return step

    def _refuse_missing_data(self, names: Container[str]) -> None:
        if "data" in names and self.data is None:
            raise HddmError("$data: is the folder of your images; name it by `data`")

    def _with_defaults(self, line: Line) -> Line:
        """A line with the file's options and the seed, unless it or its file of settings has them.

        Raises `HddmError` for samples of a network alone with options of routing.
        """
        is_alone = self._is_alone(line)
        for name in sorted(ROUTING):
            if is_alone and name in line.given:
                shown = " ".join(line.given[name])
                raise HddmError(f"{shown}: has no effect on a network alone; leave it out")
        if line.verb in self._defaults:
            # What a file of settings says that the line itself names comes before defaults, too. A file that
            # the defaults name is one of them, and comes after the options beside it, as on any command line.
            in_config = self._in_config(line)
            defaults = self._defaults[line.verb].without(in_config)
            if is_alone:
                defaults = defaults.without(ROUTING)
            if "native" in line.given or "native" in in_config:
                defaults = defaults.without(OF_SOLVER)
            line = line.or_else(defaults)
        seed = Line(line.verb, {}).with_options({"seed": "$seed"})
        if STEP_KINDS.get(line.verb, StepKind()).is_seeded:
            line = line.or_else(seed.without(self._in_config(line)))
        return line

    def _is_alone(self, line: Line) -> bool:
        """True for samples of a network alone, and of experts between which nothing has to choose."""
        if line.verb != "sample" or "source" not in line.given:
            return False
        model = self.models.of(self._model(*line.given["source"]))
        return model is not None and model.is_alone

    def _in_config(self, line: Line) -> Mapping[str, Any]:
        """What a line's file of settings says, by parameter; nothing if it names none."""
        if "config" not in line.given:
            return {}
        _, text = line.given["config"]
        names = names_in(text)
        self._refuse_missing_data(names)
        if not {"data", "seed"}.issuperset(names):
            why = "is read before any step runs, so no step can write it"
            raise HddmError(f"--config {text}: {why}; name a file that is there")
        path = Path(placed(text, {"data": str(self.data), "seed": str(self.seed)}))
        # Known from before it is read, so that a step that reads it after a change is refused.
        self.contents.of(path)
        return read_yaml(path)


def _refuse_unready(step: Step) -> None:
    """Refuse a step that would fail for what this machine lacks, which may be hours away."""
    if step.verb != "evaluate":
        step.refuse_missing()
        return
    refuse_unknown(step.values["features"])
    step.refuse_missing()
    try:
        refuse_absent(step.values["features"])
    except HddmError:
        # Asked last, since it reads all data.
        if not step.is_done:
            raise


def _refuse_outside(word: str, inputs: Mapping[str, Step]) -> None:
    """Refuse a path that begins in the folder of a step and leaves it, which would go unnoticed."""
    if ".." in Path(word).parts and any(name in inputs for name in names_in(word)):
        raise HddmError(f"{word}: leads out of the step's folder; name what is in it")


def _refuse_missing_shard(step: Step, path: Path) -> None:
    """Refuse a path to a shard, or to held-out images, that the partition in its place will not have."""
    names = [name for name in names_in(path.parts[0]) if name in step.inputs] if path.parts else []
    if not names or len(path.parts) == 1:
        return
    source, part = step.inputs[names[0]], path.parts[1]
    match = _SHARD.fullmatch(part)
    number = _num_shards(source)
    if match is not None and number is not None and int(match[1]) >= number:
        raise HddmError(f"{path}: no such shard; ${source.name} has {number}, from shard_0")
    if part == HELD_OUT and source.verb == "partition" and not source.values["held_out"]:
        raise HddmError(
            f"{path}: ${source.name} holds no images out; hddm partition --held-out does"
        )


def _num_shards(step: Step) -> int | None:
    """The number of shards that a step writes; None for one that writes anything else."""
    if step.verb == "partition":
        return step.values["shards"] or len(step.values["classes"])
    if step.verb == "encode":
        for name, source in step.inputs.items():
            if str(step.values["source"]) == f"${name}":
                return _num_shards(source)
    return None


def slug(name: str) -> str:
    """A row's name as part of a path."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:_LONGEST].strip("-.")


def _words_of(values: Mapping[str, str]) -> list[str]:
    """Words of a command line that sets the options ``values``."""
    words: list[str] = []
    for name, value in values.items():
        words += [f"--{name.replace('_', '-')}", value]
    return words


def _changes(table: Table) -> list[dict[str, str]]:
    """Options to change in a row of the file, for each row of the table that is made of it."""
    changes: list[dict[str, str]] = [{}]
    if table.product:
        for key, values in table.vary.items():
            combined = []
            for change in changes:
                combined += [change | {key: str(value)} for value in values]
            changes = combined
        return changes
    for key, values in table.vary.items():
        changes += [{key: str(value)} for value in values]
    # With one option, the row as it is does not come first.
    return changes[1:] if len(table.vary) == 1 else changes
