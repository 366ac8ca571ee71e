"""Tiny real artefacts that the tests make themselves, and small helpers to take them apart."""

import contextlib
import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hddm.data.images import ImageSet, decode_image, save_png, stack
from hddm.data.shard_records import PIXELS, read_manifest
from hddm.data.shards import Rows, Samples, Shard, open_shard
from hddm.data.sources import open_source
from hddm.experts.records import EXPERT_FILE
from hddm.schedules import Schedule
from hddm.training.objectives import Objective, objective_of
from hddm.training.settings import (
    ExpertRecipe,
    ExpertSettings,
    LoopFields,
    Recipe,
    RouterSettings,
    resolve,
)
from hddm.utils.errors import HddmError
from hddm.utils.processes import switched
from hddm.utils.records import MANIFEST, write_manifest

Command = Callable[..., tuple[int, str, str]]
"""Runs ``hddm`` with arguments: exit code, standard output, standard error."""

SIDE = 4
PER_CLASS = 24
CLASSES = ("columns", "rows")


def draw(name: str, num: int, seed: int, side: int = SIDE) -> torch.Tensor:
    """Gray images (num, 1, side, side) in bytes: two bright columns, or two bright rows, under noise."""
    images = np.random.default_rng(seed).integers(0, 60, (num, 1, side, side)).astype(np.uint8)
    middle = slice(side // 2 - 1, side // 2 + 1)
    images[(..., middle) if name == "columns" else (..., middle, slice(None))] += 190
    return torch.from_numpy(images)


def write_images(folder: Path, per_class: int = PER_CLASS, side: int = SIDE, seed: int = 0) -> Path:
    """Write ``folder/<class>/<n>.png``; images of other seeds are others."""
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for index, image in enumerate(draw(name, per_class, seed + number, side)):
            save_png(image, folder / name / f"{index:02d}.png")
    return folder


def expert_settings(objective: str, **changes: Any) -> ExpertSettings:
    """A training of ten steps."""
    uniform = {"objective": objective, "time_sampling": "uniform"}
    return ExpertSettings.model_validate({**uniform, **_SHORT, **changes})


def recipe(**values: Any) -> Recipe:
    """A training's recipe with these values and defaults."""
    return resolve(Recipe, LoopFields[None].model_validate(values))


def expert_recipe(objective: str, **changes: Any) -> ExpertRecipe:
    """The recipe of `expert_settings`."""
    return resolve(ExpertRecipe, expert_settings(objective, **changes))


def objective_named(
    name: str, schedule: Schedule | None = None, time_sampling: str = "uniform", **changes: Any
) -> Objective:
    """An objective with defaults for what is left open; it predicts the sample."""
    values = {
        "steps": 1,
        "objective": name,
        "prediction": "sample",
        "time_sampling": time_sampling,
        **changes,
    }
    return objective_of(resolve(ExpertRecipe, ExpertSettings.model_validate(values)), schedule)


def router_settings(**changes: Any) -> RouterSettings:
    """A training of ten steps."""
    return RouterSettings.model_validate({**_SHORT, **changes})


_SHORT = {"steps": 10, "batch_size": 16, "learning_rate": 3e-3, "warmup": 2, "ema_decay": 0.9}
_SHORT |= {"size": "tiny", "seed": 7, "optimizer": "adamw"}


def shard_record(folder: Path) -> dict[str, Any]:
    """What an expert without classes records of the second shard of two, in ``folder``."""
    shard = open_shard(folder)
    place = {"index": 1, "num_shards": 2, "partition": shard.partition}
    # Few enough for the hashes of all of them.
    sketch = sorted(sha256[:16] for sha256 in shard_files(folder).values())
    return place | {"hash": shard.hash, "images": len(shard), "class_images": [], "sketch": sketch}


def number_of_pixels(pixels: np.ndarray) -> float:
    """In [0, 1), by which an image is held out: below the share, it is."""
    digest = hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def shard_files(folder: Path) -> dict[str, str]:
    """The images of a shard and their hashes."""
    return {entry.file: entry.sha256 for entry in read_manifest(folder).images}


def as_traced() -> contextlib.AbstractContextManager[None]:
    """Networks compute what `torch.compile` traces of them, operation by operation."""
    return switched(torch.compiler, "is_dynamo_compiling", lambda: True)


def copied(folder: Path, target: Path) -> Path:
    """A copy of an artefact that a test may spoil."""
    return Path(shutil.copytree(folder, target / folder.name))


def variant(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of an expert with another record."""
    shutil.copytree(source, target)
    edit_json(target / EXPERT_FILE, **changes)
    return target


def into_hub_cache(folder: Path, repository: Path) -> Path:
    """Move a folder into a hub's cache, where its files are links to blobs; its new place is returned."""
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        blob, link = repository / "blobs" / str(number), snapshot / path.relative_to(folder)
        path.rename(blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The one line with which a call refuses, and its details below."""
    with pytest.raises(HddmError) as refused:
        call(*arguments, **options)
    assert "\n" not in refused.value.message
    return str(refused.value)


def printed(hddm: Command, *arguments: object) -> str:
    """What a command that succeeds prints."""
    code, text, error = hddm(*arguments)
    assert code == 0, error
    return text


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file, and of no other that is the same by a hard link.

    A folder that has a manifest gets it anew.
    """
    content = json.loads(path.read_text()) | changes
    path.unlink()
    path.write_text(json.dumps(content))
    if path.name != MANIFEST:
        seal(path.parent)


def seal(folder: Path) -> None:
    """Write the manifests of a model's folder, and of those it lies in, anew, as of what was meant so."""
    for one in (folder, *folder.parents):
        if (one / MANIFEST).exists() and any((one / record).exists() for record in MODELS):
            write_manifest(one)


MODELS = ("expert.json", "router.json", "ensemble.json")


def pixels_of(shard: Shard) -> torch.Tensor:
    """Pixels (N, C, H, W) in uint8."""
    assert isinstance(shard.stored, Samples)
    return shard.stored.tensors[PIXELS].take(torch.arange(len(shard)))


def with_pixels(shard: Shard, pixels: torch.Tensor) -> Shard:
    """The same shard of other images."""
    return replace(shard, stored=Samples({PIXELS: Rows((pixels,))}))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under ``folder`` by its relative path; hidden ones too."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def killing(
    event: str, argument: str, number: signal.Signals = signal.SIGKILL
) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that sends ``number`` at ``event``, where one of its arguments holds ``argument``."""

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name == event and any(argument in str(one) for one in arguments):
            os.kill(os.getpid(), number)

    return hook


CHANGES = ("os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "os.chmod")
"""Audit events of Python for changes of folders."""


def killed_at_every_change(
    call: Callable[[], object], check: Callable[[], object], changes: Sequence[str] = CHANGES
) -> int:
    """Call in processes of which the first is killed at its first change of a folder, the next at its second.

    The last one lives to its end. Each death is followed by a ``check``; their number is returned.
    """
    last = 0
    while True:
        last += 1
        if (child := os.fork()) == 0:
            seen = itertools.count(1)

            def hook(
                name: str, arguments: tuple[Any, ...], seen: Any = seen, last: int = last
            ) -> None:
                if name in changes and next(seen) == last:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            call()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return last - 1
        check()


# Packages that take seconds to import, most of them with torch below.
HEAVY = {
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "sklearn",
    "scipy",
    "matplotlib",
    "rich",
}

_RUN = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))
from hddm_cli.app import app
for line in json.loads(sys.argv[1]):
    sys.argv = ["hddm", *line]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            app()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    print(json.dumps([code, said.getvalue(), list(sys.modules)]))
"""


def in_a_fresh_process(
    lines: Iterable[Sequence[object]], missing: Sequence[str] = ()
) -> list[tuple[int, str, set[str]]]:
    """Of each command its exit code, its output, and which of `HEAVY` are imported after it.

    Packages that are ``missing`` cannot be imported.
    """
    runs = run_in_one(lines, missing)
    return [(code, output, HEAVY & modules) for code, output, modules in runs]


def in_fresh_processes(lines: Iterable[Sequence[object]]) -> list[tuple[int, str, set[str]]]:
    """As `run_in_one`, each command in a process of its own."""
    found = []
    for line in lines:
        found += run_in_one([line])
    return found


def run_in_one(
    lines: Iterable[Sequence[object]], missing: Sequence[str] = ()
) -> list[tuple[int, str, set[str]]]:
    """Of each command its exit code, its output, and the modules that are imported after it."""
    arguments = json.dumps([list(map(str, line)) for line in lines])
    run = subprocess.run(
        [sys.executable, "-c", _RUN, arguments, *missing], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found = map(json.loads, run.stdout.splitlines())
    return [(code, output, set(modules)) for code, output, modules in found]


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond ``size`` bytes of a file fail in this block, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Died(BaseException):
    """Stands for the death of a training between two steps."""


def ending_at(last: int) -> Callable[[int, float, float], None]:
    """An ``on_step`` that ends a training after its step ``last``."""

    def on_step(step: int, loss: float, seconds: float) -> None:
        if step == last:
            raise Died

    return on_step


def load_images(root: Path) -> ImageSet:
    """Read all images of a source in sorted order; raises as `open_source`, `decode_image` and `stack`."""
    source = open_source(root)
    names = source.files
    pixels = stack(
        [decode_image(source.read(i), root / name) for i, name in enumerate(names)], names, root
    )
    labels = None if source.labels is None else torch.tensor(source.labels)
    return ImageSet(root, tuple(names), pixels, labels, source.classes)
