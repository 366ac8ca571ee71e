"""A step of a benchmark: one command line of hddm, known by all that its result depends on.

A step's identity is the hash of what its verb gets: the values that the verb itself parses, with defaults,
where the identity of a step stands for its folder and the content of a file or folder for its path. So the
spelling of a command line decides nothing, and equal steps of rows, seeds and files are done once.
"""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hddm.benchmark.file import preset_names
from hddm.benchmark.lines import Line, Settings, names_in, placed
from hddm.experts.ensemble_records import MOMENTS, RELIABILITY
from hddm.utils.addresses import address_of
from hddm.utils.errors import HddmError
from hddm.utils.files import is_draft, remove, sha256_of
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE, HASHES, ROUTER_FILE, HashCache
from hddm.utils.work import DONE, Work, hash_of

NUMERICS = "5"
"""Part of every identity; raise it when verbs compute something else from the same values."""


class StepKind(NamedTuple):
    """What a benchmark knows of a verb of hddm."""

    is_seeded: bool = False
    """It gets ``--seed``."""
    continues: tuple[str, ...] = ()
    """Options with which it goes on after it was killed, whatever `_FREE` parameters it had before."""
    is_training: bool = False
    """Its operations are counted."""
    learns: bool = False
    """It learns from the images that it reads."""
    is_of_unknown_cost: bool = False
    """The cost of what it trains, or of the model that it reads, is not known."""
    units: int = 1_000
    """Progress of a step, about its milliseconds on one core."""
    units_an_image: float = 0.0
    """Further progress for each image that it is trained on, or makes."""
    units_a_step: float = 0.0
    """Further progress for each step of a training whose batch is always the same."""
    version: int = 1
    """Part of its steps' identities from 2 on; raised when this verb alone computes something else."""


_TRAINING = StepKind(is_seeded=True, continues=("--resume", "--allow-config-change"), learns=True)
STEP_KINDS = {
    "train expert": _TRAINING._replace(is_training=True, units_an_image=3.0),
    "train router": _TRAINING._replace(is_training=True, units_an_image=0.4),
    "train all": _TRAINING._replace(is_of_unknown_cost=True),
    # From version 2 on, samples and trajectories begin with the first step of `hddm.times`.
    "distill": _TRAINING._replace(is_training=True, units_an_image=3.0, version=2),
    "convert": StepKind(is_of_unknown_cost=True),
    "calibrate": StepKind(learns=True, units=10_000),
    # Images of another device are not continued but replaced.
    "sample": StepKind(
        is_seeded=True, continues=("--resume", "--overwrite"), units_an_image=25.0, version=2
    ),
    "evaluate": StepKind(units=15_000),
    "partition": StepKind(units=3_000),
    "data old-model": StepKind(is_of_unknown_cost=True, learns=True, units_a_step=96.0),
}
"""Verbs that are not like any other."""
_FREE = frozenset(
    {
        "device",
        "threads",
        "checkpoint_every",
        "keep",
        "log_every",
        "offload",
        "max_memory",
        "cache",
        "tracker",
        "run_name",
        "parallel",
        "ray",
        "retries",
        "allow_config_change",
        # What it says is in the values of other parameters.
        "config",
    }
)
"""Parameters that decide no result."""
_WIDE = {"inception": 400_000, "efficientnet-lite0": 200_000}
"""Progress of evaluations on many features, whose covariances take long."""
SCORES = ".json"
"""Ending of what ``hddm evaluate`` writes, which is a file."""
INPUTS = "inputs"
"""Folder in that of all jobs, with a folder per step of links to what it reads."""


_MODELS = (EXPERT_FILE, ROUTER_FILE, ENSEMBLE_FILE)
_NAMES = {
    ("assemble", "router"): (MOMENTS, RELIABILITY),
    ("benchmark", "which"): tuple(preset_names()),
    ("evaluate", "features"): (
        "auto",
        "inception",
        "classifier",
        "digits-classifier",
        "efficientnet-lite0",
    ),
    ("partition", "features"): ("pixels", "efficientnet-lite0", "dinov2", "clip"),
}
"""Parameters that are a path or one of these names, by verb."""
_ON_HUB = {("partition", "features")}
"""Those of them that may also name a model on the hub."""


class Contents:
    """Hashes of the files and folders that a benchmark reads, each computed once in a run."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[str, str]] = {}

    def of(self, path: Path) -> str:
        """SHA-256 of a file, or of the names and contents of all files in a folder; links are followed.

        Raises `HddmError` for a path that is not there.
        """
        if path not in self._known:
            state = self._state(path)
            self._known[path] = _content_of(path), state
        return self._known[path][0]

    def refuse_changed(self, path: Path) -> None:
        """Raise `HddmError` if a file of ``path`` was written, added or removed since `of`."""
        if path in self._known and self._state(path) != self._known[path][1]:
            text = "has changed since the benchmark was started; start it again, and leave the data alone"
            raise HddmError(f"{path}: {text}")

    @staticmethod
    def _state(path: Path) -> str:
        """Hash of what a change of a file changes: its size, its number and when it was written."""
        lines = []
        for name, file in _files_in(path):
            if file is not None:
                status = file.stat()
                # Not when its status changed: shards hold hard links to images.
                name += f" {status.st_size} {status.st_ino} {status.st_mtime_ns}"
            lines.append(name)
        return hash_of(lines)


def _content_of(path: Path) -> str:
    if path.is_file():
        return sha256_of(path)
    content = []
    for name, file in _files_in(path):
        content.append([name, None if file is None else sha256_of(file)])
    return hash_of(content)


def _files_in(path: Path) -> list[tuple[str, Path | None]]:
    """Files of a folder by name, or the file that ``path`` is; hddm's caches are left out.

    A circle of links, or a folder that is linked twice, has a name and no file.
    """
    if not path.exists():
        raise HddmError(f"{path}: no such file or folder")
    if path.is_file():
        return [(path.name, path)]
    found: list[tuple[str, Path | None]] = []
    seen: dict[str, str] = {}
    for place, folders, files in os.walk(path, followlinks=True):
        here = _text_of(Path(place).relative_to(path))
        first = seen.setdefault(os.path.realpath(place), here)
        if first != here:
            # A circle, or a folder that is linked twice.
            found.append((f"{here} -> {first}", None))
            folders.clear()
            continue
        # In one order everywhere, since the first of several links to a folder stands for it.
        folders[:] = sorted(name for name in folders if not _is_cache(name))
        for name in files:
            one = Path(place, name)
            if not _is_cache(name) and one.is_file():
                found.append((_text_of(one.relative_to(path)), one))
    return sorted(found, key=lambda pair: pair[0])


def _text_of(path: Path) -> str:
    # Names may be of any bytes.
    return os.fsencode(path.as_posix()).decode(errors="backslashreplace")


def _is_cache(name: str) -> bool:
    """True for what processes of hddm write beside the files that they read."""
    return name == HASHES or is_draft(name) or (name.startswith(".") and name.endswith(".lock"))


def _holds_model(folder: Path) -> bool:
    return any((folder / record).is_file() for record in _MODELS)


@dataclass(frozen=True)
class Step:
    """One command line, with ``$name`` for its ``inputs``, by name, and ``$data`` for the user's folder."""

    name: str
    line: Line
    settings: Settings
    inputs: Mapping[str, "Step"]
    seed: int | None
    """The seed of this step or of one of its inputs."""
    work: Work
    data: Path | None = None
    contents: Contents = field(default_factory=Contents)

    @property
    def verb(self) -> str:
        """As in ``train expert``; empty for a finished model, which is no step."""
        return self.line.verb

    @property
    def kind(self) -> StepKind:
        """What its verb does."""
        return STEP_KINDS.get(self.verb, StepKind())

    @property
    def is_counted(self) -> bool:
        """True if its operations may count (`hddm.benchmark.origin.counted_parts`)."""
        return self.kind.is_training or self.verb == "sample"

    @property
    def may_calibrate(self) -> bool:
        """True for a training or a calibration; operations of the fit are counted apart."""
        return self.kind.is_training or self.verb == "calibrate"

    @property
    def units(self) -> int:
        """About how long it takes, in milliseconds of one core; networks differ, so it is a guess."""
        images, steps = 0, 0
        if self.kind.units_a_step:
            steps = self.values["steps"]
        elif self.kind.is_training:
            images = self.values["steps"] * self.values["batch_size"]
        elif self.verb == "sample":
            images = self.values["num_images"]
        elif self.verb == "evaluate" and self.values["features"] in _WIDE:
            return _WIDE[self.values["features"]]
        further = images * self.kind.units_an_image + steps * self.kind.units_a_step
        return self.kind.units + round(further)

    @property
    def values(self) -> Mapping[str, Any]:
        """What its verb gets, by parameter."""
        return self.settings.values

    @cached_property
    def paths(self) -> list[tuple[str, Path]]:
        """Paths that it reads, each with its parameter, with ``$name`` for the folders of steps."""
        found = []
        for name, value in self.values.items():
            if self._is_path(name, value):
                values = value if isinstance(value, list | tuple) else [value]
                found += [(name, Path(one)) for one in values if isinstance(one, str | Path)]
        return found

    @cached_property
    def sources(self) -> list[Path]:
        """Paths that it reads and that no step writes."""
        return [path for _, path in self.paths if not self._names(str(path))]

    def placed_path(self, path: Path) -> Path:
        """Where a path that it reads lies."""
        places = {name: str(step.path) for name, step in self.inputs.items()}
        return Path(placed(str(path), places))

    def paths_within(self, name: str) -> list[Path]:
        """The paths that it reads in the folder of the input ``name``."""
        found = []
        for _, path in self.paths:
            if name in self._names(str(path)):
                found.append(self.placed_path(path))
        # An option such as --share may name an input that no path leads to.
        return found or [self.inputs[name].path]

    def _is_path(self, name: str, value: Any) -> bool:
        """True if the parameter ``name`` has paths that are read for its ``value``."""
        if name in self.settings.inputs:
            return True
        known = _NAMES.get((self.verb, name))
        if known is None or value is None or value in known:
            return False
        return (self.verb, name) not in _ON_HUB or Path(value).exists()

    def refuse_missing(self) -> None:
        """Refuse paths that it reads and that neither are there nor are written by a step."""
        for path in self.sources:
            address = address_of(path)
            if address is not None:
                raise HddmError(
                    f"{address}: a benchmark reads files of this machine; fetch it first"
                )
            if not path.exists():
                raise HddmError(f"{path}: no such file or folder")

    def refuse_changed(self) -> None:
        """Refuse what it wrote if what it read was changed since the identity was computed."""
        for path in self.sources:
            self.contents.refuse_changed(path)

    @property
    def reads_a_finished_model(self) -> bool:
        """True if it reads a model that no step made, whose training cost is not known."""
        return any(map(_holds_model, self.sources))

    @property
    def writes_ensemble(self) -> bool:
        """True if it assembles experts, or weighs those of an ensemble."""
        if self.verb != "calibrate":
            return self.verb == "assemble"
        path = Path(self.values["expert"])
        names = self._names(str(path))
        if not names:
            return (path / ENSEMBLE_FILE).is_file()
        return len(path.parts) == 1 and self.inputs[names[0]].writes_ensemble

    @cached_property
    def identity(self) -> str:
        """SHA-256 of all that its result depends on."""
        seen = {}
        for name, value in self.values.items():
            if name not in _FREE:
                seen[name] = self.identified(value)
        versions = [] if self.kind.version == 1 else [self.kind.version]
        return hash_of([NUMERICS, self.verb, seen, *versions])

    def identified(self, value: Any) -> Any:
        """A value with the identity of a step for its folder, and the content of a file for its path."""
        if isinstance(value, Mapping):
            pairs = [[self.identified(key), self.identified(one)] for key, one in value.items()]
            return sorted(pairs, key=repr)
        if isinstance(value, list | tuple):
            return [self.identified(one) for one in value]
        if not isinstance(value, str | Path):
            return value
        text = str(value)
        if self._names(text):
            return self._placed_identities(text)
        # Any other text that happens to be a path in the working folder is not read.
        if os.path.abspath(text) not in map(os.path.abspath, self.sources):
            return text
        # Verbs call experts by the names of their folders; options such as --share name one of those experts.
        return [self.contents.of(Path(text)), value.name if isinstance(value, Path) else text]

    def _placed_identities(self, text: str) -> str:
        """A text with the identities of its inputs; the last part of a path is a name that verbs record."""
        identities = {name: step.identity for name, step in self.inputs.items()}
        last = Path(text).name
        name = last if self._names(last) else ""
        return f"{placed(text, identities)} {name}"

    def _names(self, text: str) -> list[str]:
        return [name for name in names_in(text) if name in self.inputs]

    @cached_property
    def path(self) -> Path:
        """Where its result lies, ``$out`` in its line."""
        return self.work.path(self.verb.replace(" ", "-"), self.identity)

    @property
    def result(self) -> Path:
        """What it writes."""
        if self.verb == "evaluate":
            return self.path.with_name(self.path.name + SCORES)
        return self.path

    @property
    def written(self) -> dict[str, Path]:
        """Its outputs by their endings; an evaluation may write a second file."""
        found = {}
        for path in sorted(self.path.parent.glob(f"{self.path.name}*")):
            ending = path.name.removeprefix(self.path.name)
            if ending != DONE:
                found[ending] = path
        return found

    @property
    def is_done(self) -> bool:
        """True if its result exists."""
        return self.work.has(self.path)

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of all files that it wrote, by their paths in the folder of all jobs."""
        return {name: sha256_of(self.work.folder / name) for name in sorted(self._file_names)}

    @property
    def _file_names(self) -> set[str]:
        found = set()
        for path in self.written.values():
            for one in path.rglob("*") if path.is_dir() else [path]:
                if one.is_file() and not _is_cache(one.name):
                    found.add(one.relative_to(self.work.folder).as_posix())
        return found

    def damage(self, hashes: HashCache) -> str | None:
        """How what it wrote differs from its record; None if nothing does."""
        try:
            known = self.work.record(self.path).get("files", {})
        except HddmError:
            return "its record has changed"
        present = self._file_names
        missing = sorted(known.keys() - present)
        if missing:
            return f"{missing[0]} was removed"
        added = sorted(present - known.keys())
        if added:
            return f"{added[0]} was added"
        changed = [name for name, sha256 in known.items() if not hashes.matches(name, sha256)]
        return f"{changed[0]} has changed" if changed else None

    def forget(self) -> None:
        """Remove what it wrote, and then its record: a start that is killed in between finds it damaged."""
        for path in self.written.values():
            remove(path)
        self.work.forget(self.path)

    @property
    def label(self) -> str:
        """Its path in the output folder: ``seed_N/name``, or the name alone for seed 0 and without a seed."""
        return f"seed_{self.seed}/{self.name}" if self.seed else self.name

    @property
    def links(self) -> dict[str, str]:
        """Paths of links of its own to its inputs, by name."""
        folder = self.work.folder / INPUTS / self.path.name
        return {name: str(folder / name) for name in self.inputs}

    def link_inputs(self) -> None:
        """Make the links to its inputs, which carry their names, beside all jobs."""
        for name, place in self.links.items():
            for ending, path in self.inputs[name].written.items():
                link_to(Path(place + ending), path)

    def command(self) -> list[str]:
        """Words that make its result in the folder of all jobs."""
        return self._command(self.placed_line, str(self.path))

    @property
    def placed_line(self) -> Line:
        """Its line with the paths in the folder of all jobs; where it writes is left to the caller."""
        return self._placed(self.links, str(self.path))

    @property
    def shown(self) -> str:
        """Its command line by labels, to be run in a folder where those of its inputs were."""
        labels = {name: step.label for name, step in self.inputs.items()}
        words = self._command(self._placed(labels, self.label), self.label)
        return f"hddm {shlex.join(words)}"

    def _placed(self, places: Mapping[str, str], out: str) -> Line:
        return self.line.placed({**places, "out": out, "data": str(self.data)})

    def _command(self, line: Line, out: str) -> list[str]:
        ending = SCORES if self.verb == "evaluate" else ""
        return [*line.words, "--out", out + ending]

    @cached_property
    def upstream(self) -> list["Step"]:
        """This step and all steps that it depends on, each once, in the order in which they run."""
        found: dict[str, Step] = {}
        for step in self.inputs.values():
            found |= {one.name: one for one in step.upstream}
        return [*found.values(), self]

    @cached_property
    def depth(self) -> int:
        """Number of steps that must be done before, in the longest chain."""
        return 1 + max((step.depth for step in self.inputs.values()), default=-1)


def link_to(link: Path, path: Path) -> None:
    """Make or replace a relative link to ``path``; both can be moved together."""
    to = os.path.relpath(path.resolve(), link.parent.resolve())
    if link.is_symlink():
        if os.readlink(link) == to:
            return
        link.unlink()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(to)
