"""A benchmark's file: steps that are command lines of hddm, and rows that are sampled, measured and compared.

    name: mine
    values: {steps: 1000}
    defaults: {train expert: --batch-size 32 --objective flow}
    steps:
      parts: partition $data --shards 2 --held-out 0.1
      one: train expert $parts/shard_0 --steps $steps
      other: train expert $parts/shard_1 --steps $steps
      both: assemble $one $other
    rows: {an expert: $one, both experts: $both --strategy draw}
    evaluate: {reference: $parts, validation: $parts/held_out, features: classifier}
    seeds: 0-4

A step is a command line without ``hddm``, ``--out`` and ``--seed``; a row is the command line of
``hddm sample``. ``$name`` is the folder that a step writes, or one of ``values``; ``$data`` is the folder
that the user names. Settings are chosen on ``seeds`` and validation images; they are confirmed on
``confirmation_seeds`` and held-out images.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hddm.utils.errors import HddmError, UsageError, choose
from hddm.utils.files import read_yaml
from hddm.utils.records import Record, Seed, SparseRecord, parse_record

_OF_SEED = re.compile(r"seed_\d+")
_PRESETS = Path(__file__).with_name("presets")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
MOST_SEEDS, MOST_ROWS, MOST_WORKERS = 1_000, 1_000, 1_000
"""Bounds of one benchmark, far above any that anybody runs."""
RESERVED = ("data", "out", "seed")
"""Names that stand for the user's folder, for what a step writes and for the training seed."""
ROUTING = frozenset({"strategy", "router_every"})
"""Options of ``hddm sample`` for several experts, which a network alone does not have."""
OF_SOLVER = frozenset({"solver", "shift"})
"""Options of ``hddm sample`` that samplers of the experts' own kind (``--native``) do not have."""
TAKEN = (
    *RESERVED,
    "jobs",
    "samples",
    "scores",
    "objective",
    "real",
    "benchmark",
    "results",
    "tables",
    "report",
)
"""Names that no step or value can have, besides ``seed_<n>``; most are in the output folder."""


def parse_seeds(text: str) -> tuple[int, ...]:
    """Parse seeds from ``0-4``, ``5,6`` or ``0-2,7``, in order; raises `HddmError` for anything else."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise HddmError(f"{part.strip()!r} is not a seed; write 0-4 or 5,6")
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first + 1 + len(found) > MOST_SEEDS:
            raise HddmError(
                f"{part.strip()!r}: a benchmark has at most {MOST_SEEDS} seeds; name fewer"
            )
        found += range(first, last + 1)
    return tuple(found)


def _seeds(value: Any) -> Any:
    """Parse a text or a single number of a file; a list, as JSON has it, becomes a tuple."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, str):
        return parse_seeds(value)
    return tuple(value) if isinstance(value, list) else value


def _once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    # What is counted twice would pass for a second measurement.
    return tuple(dict.fromkeys(values))


Names = Annotated[tuple[str, ...], AfterValidator(_once)]
Seeds = Annotated[
    tuple[Seed, ...], Field(max_length=MOST_SEEDS), BeforeValidator(_seeds), AfterValidator(_once)
]
Text = Annotated[str, Field(min_length=1, max_length=200)]
"""A name of a row or table."""
DecidingSplit = Literal["validation", "held_out"]


def _domains(domains: dict[str, str]) -> dict[str, str]:
    """Refuse names and classes that ``--domain NAME=CLASS,CLASS`` reads as others."""
    seen: dict[str, str] = {}
    for name, classes in domains.items():
        if "=" in name or name != name.strip():
            raise ValueError(
                f"domain {name!r}: its name has no = and no space at its ends; rename it"
            )
        for one in classes.split(","):
            if not one or one != one.strip():
                raise ValueError(f"domain {name!r}: write its classes as 0,1,2, not {classes!r}")
            if one in seen:
                raise ValueError(
                    f"class {one!r} is in domain {name!r} and in {seen[one]!r}; name it once"
                )
            seen[one] = name
    return domains


class Measuring(Record):
    """Images to measure samples against, as in ``hddm evaluate``."""

    reference: str
    validation: str | None = None
    """Images that settings are chosen by."""
    held_out: str | None = None
    """Images that nothing is chosen by."""
    features: str = "auto"
    """``classifier``, trained once on the reference; ``inception`` or the file of a classifier; or
    ``auto``: inception where its weights are on disk, else classifier."""
    second_features: str | None = None
    """Features of a second distance beside the one that decides: as `features`, except for ``classifier``
    and ``auto``, so that it is by one network in every run."""
    domains: Annotated[dict[Text, Text], AfterValidator(_domains)] = Field(default_factory=dict)
    """Classes of each domain, as ``0,1,2``, for scores by domain."""
    options: str = ""
    """Further options of ``hddm evaluate``, such as ``--mirrored``."""
    objective: bool | str = False
    """Also score models on the same images by their errors and bits per dimension (`hddm.objective`).

    True, or options of ``hddm evaluate MODEL``, such as ``--num-images 128``.
    """

    @model_validator(mode="after")
    def _has_two_features(self) -> "Measuring":
        """Refuse second features that are no others, or that each run would train anew."""
        second = self.second_features
        if second in ("auto", "classifier"):
            raise ValueError(
                f"second_features: {second!r} may differ from run to run; name features that do not, such "
                "as efficientnet-lite0"
            )
        # Where Inception's weights are on the disk, auto is Inception.
        first = "inception" if self.features == "auto" else self.features
        if second == first:
            raise ValueError(
                f"second_features: {second!r} may be what features: {self.features} measures by already; "
                "name others, or leave it out"
            )
        return self


def _by_parameter(vary: dict[str, Any]) -> dict[str, Any]:
    """Options by one spelling; ``router-every`` is ``router_every``."""
    found: dict[str, Any] = {}
    for name, values in vary.items():
        parameter = name.replace("-", "_")
        if parameter in found:
            raise ValueError(f"{name!r} is there twice, in two spellings; write it once")
        found[parameter] = values
    return found


Vary = Annotated[
    dict[str, Annotated[tuple[str | int | float, ...], Field(min_length=1)]],
    AfterValidator(_by_parameter),
]


class Table(Record):
    """A table of the report: rows of the file, each also with other values of sampling options."""

    rows: Names = ()
    """By name; all, if empty."""
    sample: str = ""
    """Options of ``hddm sample`` for all rows; those of `ROUTING` for all that are no network alone."""
    vary: Vary = Field(default_factory=dict)
    """Values to try by option; with several options, the rows as they are come first."""
    product: bool = False
    """Combine all values instead of changing one at a time."""

    @property
    def variations(self) -> int:
        """Rows that one row of the file becomes, at most."""
        sizes = [len(values) for values in self.vary.values()]
        return math.prod(sizes) if self.product else sum(sizes) + 1


def _as_parameters(names: tuple[str, ...]) -> tuple[str, ...]:
    """Options by one spelling; ``guidance-scale`` is ``guidance_scale``."""
    return tuple(name.replace("-", "_") for name in names)


class Compare(SparseRecord):
    """Rows to compare; the distance to images that were not trained on decides."""

    sparse = ("varies",)

    candidates: Names = ()
    """By name; all that are no baseline, if empty."""
    baselines: Names = ()
    varies: Annotated[Names, AfterValidator(_as_parameters)] = ()
    """Options of ``hddm sample`` that differ on purpose, as in ``hddm compare``."""

    def has(self, candidate: str, baseline: str) -> bool:
        """True if the row ``candidate`` is to be compared with ``baseline``."""
        if candidate == baseline or baseline not in self.baselines:
            return False
        if self.candidates:
            return candidate in self.candidates
        return candidate not in self.baselines


class BenchmarkFile(Record):
    """A whole benchmark."""

    name: str
    title: str = ""
    """Headline of the report."""
    values: dict[str, str | int | float] = Field(default_factory=dict)
    """Texts for ``$name`` in any command line, which ``--set`` changes."""
    defaults: dict[str, str] = Field(default_factory=dict)
    """Default options by verb, for steps whose command line does not state them."""
    steps: Annotated[dict[str, str], Field(min_length=1)]
    about: dict[str, str] = Field(default_factory=dict)
    """Sentences that introduce steps."""
    rows: Annotated[
        dict[Text, Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_ROWS)
    ]
    captions: dict[str, str] = Field(default_factory=dict)
    """What the first samples of a row show."""
    tables: Annotated[dict[Text, Table], Field(min_length=1)] = Field(
        default_factory=lambda: {"models": Table()}
    )
    evaluate: Measuring
    compare: Compare = Compare()
    budgets: dict[str, Names] = Field(default_factory=dict)
    """Rows whose training compute is to be equal."""
    not_counted: Names = ()
    """Steps that were there before, whose compute counts for no row but their own."""
    same: dict[str, tuple[str, str]] = Field(default_factory=dict)
    """Pairs of sampled folders, of which the report says how many images are equal, pixel for pixel."""
    split: DecidingSplit | None = None
    """Images that are scored on; validation images where there are some."""
    seeds: Annotated[Seeds, Field(min_length=1)] = (0, 1, 2, 3, 4)
    """One training of everything per seed."""
    confirmation_seeds: Seeds = ()
    """Fresh ones, for held-out images."""
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 2
    """Steps at a time, each with one CPU thread; results do not depend on it."""

    @property
    def scored_on(self) -> DecidingSplit:
        """The split that decides."""
        return self.split or ("held_out" if self.evaluate.validation is None else "validation")

    @model_validator(mode="after")
    def _names_what_there_is(self) -> "BenchmarkFile":
        """Refuse names and seeds that would go unnoticed or fail late."""
        both = sorted(self.steps.keys() & self.values)
        if both:
            raise ValueError(f"{both[0]!r} is both a step and a value; rename one")
        for name in (*self.steps, *self.values):
            # Some disks do not tell capitals from small letters.
            if name.lower() in TAKEN or _OF_SEED.fullmatch(name.lower()):
                raise ValueError(f"{name!r} is taken by the benchmark itself; choose another name")
            if re.fullmatch(r"[A-Za-z_][\w-]*", name) is None:
                text = "cannot be the name of a step or value; use letters, digits, - and _"
                raise ValueError(f"{name!r} {text}")
        by_folder: dict[str, str] = {}
        for name in self.steps:
            other = by_folder.setdefault(name.lower(), name)
            if other != name:
                raise ValueError(
                    f"steps {other!r} and {name!r} are one folder on some disks; rename one"
                )
        sizes = [len(table.rows or self.rows) * table.variations for table in self.tables.values()]
        if sum(sizes) > MOST_ROWS:
            raise ValueError(
                f"a benchmark has at most {MOST_ROWS} rows, and these are {sum(sizes)}; vary less"
            )
        rows: list[str] = []
        for table in self.tables.values():
            rows += table.rows
        rows += [*self.compare.candidates, *self.compare.baselines, *self.captions]
        for names in self.budgets.values():
            rows += names
        _refuse_unknown(rows, self.rows, "row")
        in_tables: set[str] = set()
        for table in self.tables.values():
            in_tables.update(table.rows or self.rows)
        compared = [*self.compare.candidates, *self.compare.baselines]
        for names in self.budgets.values():
            compared += names
        for name in compared:
            if name not in in_tables:
                text = "is in no table, so it is never measured; name it in one, or nowhere"
                raise ValueError(f"row {name!r} of `compare` or `budgets` {text}")
        self._refuse_never_compared()
        _refuse_unknown([*self.not_counted, *self.about], self.steps, "step")
        if getattr(self.evaluate, self.scored_on) is None:
            raise ValueError(
                f"evaluate.{self.scored_on}: is required; name the images that are scored on"
            )
        twice = sorted(set(self.seeds) & set(self.confirmation_seeds))
        if twice:
            raise ValueError(
                f"seed {twice[0]} is in both seeds and confirmation_seeds; remove it from one"
            )
        return self

    def _refuse_never_compared(self) -> None:
        """Refuse candidates and baselines that no table has together."""
        met: set[str] = set()
        for table in self.tables.values():
            for one, other in itertools.permutations(table.rows or self.rows, 2):
                if self.compare.has(one, other):
                    met |= {one, other}
        for kind in ("candidates", "baselines"):
            for name in getattr(self.compare, kind):
                if name not in met:
                    other = "baseline" if kind == "candidates" else "candidate"
                    text = f"has no {other} beside it in any table, so it is compared with nothing"
                    raise ValueError(f"compare.{kind}: row {name!r} {text}; name both in one table")


def _refuse_unknown(names: Sequence[str], known: Mapping[str, Any], what: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}: {choose(name, list(known))}")


def preset_names() -> list[str]:
    """Names of the presets, in order."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def read_benchmark(
    which: str,
    values: Mapping[str, str] | None = None,
    seeds: str | None = None,
    held_out: bool = False,
    workers: int | None = None,
) -> BenchmarkFile:
    """Read the preset called ``which``, or a user's file: a name with a suffix or a folder in it.

    ``values``, ``seeds`` and ``workers`` of one start replace the file's. ``held_out`` confirms on held-out
    images, by default with the confirmation seeds. Seeds that would both choose settings and confirm them,
    unknown values and presets, and mistakes in the file raise `HddmError`.
    """
    path = Path(which)
    if "/" not in which and not path.suffix:
        if which not in preset_names():
            raise UsageError(
                f"{which}: no such preset; give the path of your own file, such as ./mine.yaml, or "
                f"{choose(which, preset_names())}"
            )
        path = _PRESETS / f"{which}.yaml"
    file = parse_record(read_yaml(path), BenchmarkFile, which)
    for name in values or ():
        if name not in file.values:
            raise UsageError(f"{which}: has no value {name!r}; {choose(name, list(file.values))}")
    changes: dict[str, Any] = {"values": file.values | dict(values or {})}
    if workers is not None:
        changes["workers"] = workers
    if held_out:
        if file.evaluate.held_out is None:
            raise UsageError(
                f"`held_out`: {which} names no images as `evaluate.held_out`; add them there"
            )
        changes["split"] = "held_out"
    scored_on = changes.get("split", file.scored_on)
    is_confirmed = scored_on == "held_out" and file.evaluate.validation is not None
    wanted = file.confirmation_seeds if is_confirmed else ()
    if seeds is not None:
        wanted = parse_seeds(seeds)
    reserved = file.seeds if is_confirmed else file.confirmation_seeds
    taken = sorted(set(wanted or file.seeds) & set(reserved))
    if taken:
        why = "reserved for confirmation (confirmation_seeds)"
        if is_confirmed:
            why = "used to choose settings"
        raise HddmError(f"seed {taken[0]} is {why}; use other `seeds`")
    if wanted:
        changes |= {"seeds": wanted, "confirmation_seeds": ()}
    return parse_record(file.model_dump() | changes, BenchmarkFile, which)
