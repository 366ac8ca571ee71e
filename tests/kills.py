"""Verbs that write, killed at any moment and run again; for `tests.soak`.

A verb runs by its command line in a process that is forked after the imports, so that a life costs no more
than its work. It is killed, or told to stop, at one of its changes of files. What then lies where it writes
is what lay there before, or what an undisturbed run writes. Run again until it lives to its end, it writes
exactly that, and leaves nothing beside it.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler
from safetensors.torch import save_file

from hddm.utils.files import restore
from hddm_cli.app import app
from tests.artefacts import CHANGES, write_images
from tests.checkpoint_files import SD_BETAS, pipeline, text_unet
from tests.component_files import write_clip, write_vae
from tests.lora_files import kohya

SECONDS = 120
"""Longest life of a small job."""
_MOST_LIVES = 4
_TRAINING = "--steps 6 --batch-size 8 --threads 1 --device cpu --checkpoint-every 2"
_NEW = f"{_TRAINING} --size tiny"


@dataclass(frozen=True)
class Verb:
    """A command that writes ``target`` in a folder with ``inputs``; ``--resume`` goes on where it can."""

    name: str
    command: str
    inputs: tuple[str, ...]
    target: str = "out"
    resumes: bool = False


_EXPERT = "train expert shards/shard_0 --out out"
_OLD = "experts/expert_0"
_INIT = f"--init {_OLD} --objective flow"
_SAMPLES = "--num-images 6 --batch-size 2 --steps 3"
_REFERENCE = "--reference shards --allow-few"
VERBS = (
    Verb("partition", "partition images --out out --shards 2", ("images",)),
    Verb("encode", "encode shards --out out --resolution 8", ("shards",)),
    Verb("encode latents", "encode shards --out out --resolution 8 --vae sd/vae", ("shards", "sd")),
    Verb("train expert", f"{_EXPERT} --objective ddpm {_NEW}", ("shards",), resumes=True),
    Verb("train --init", f"{_EXPERT} {_INIT} {_TRAINING}", ("shards", "experts"), resumes=True),
    Verb("train router", f"train router shards --out out --calibrate {_NEW}", ("shards",), resumes=True),
    Verb("distill", f"distill ensemble --data shards --out out {_NEW}", ("shards", "ensemble"), resumes=True),
    Verb("sample", f"sample ensemble --out out {_SAMPLES}", ("ensemble",), resumes=True),
    Verb("convert", "convert sd --out out", ("sd",)),
    Verb("convert lora", "convert lora/a.safetensors --base sd-expert --out out", ("lora", "sd-expert")),
    Verb("merge", "merge sd-expert lora-expert --out out", ("sd-expert", "lora-expert")),
    Verb("write back", "convert sd-expert --out out --to-layout diffusers-unet2d-condition", ("sd-expert",)),
    Verb("assemble", "assemble experts/expert_0 experts/expert_1 --out out", ("experts",)),
    Verb("change", "assemble ensemble --remove 1", ("ensemble",), "ensemble"),
    Verb("calibrate", f"calibrate {_OLD} --data shards/shard_0", ("experts", "shards"), _OLD),
    Verb("calibrate inside", "calibrate ensemble/experts/0 --steps 5", ("ensemble",), "ensemble"),
    Verb("evaluate", f"evaluate images {_REFERENCE} --out out.json", ("images", "shards"), "out.json"),
)

_INPUTS = (
    "partition images --out shards --shards 2",
    f"train expert shards/shard_0 --out experts/expert_0 --objective ddpm {_NEW}",
    f"train expert shards/shard_1 --out experts/expert_1 --objective flow {_NEW}",
    f"train router shards --out router {_NEW}",
    "assemble experts/expert_0 experts/expert_1 --router router --out ensemble",
    "convert sd --out sd-expert",
    "convert lora/a.safetensors --base sd-expert --out lora-expert",
)


@dataclass(frozen=True)
class Moment:
    """The end of a life: ``number`` is sent at the change of that index."""

    number: signal.Signals
    change: int


@dataclass(frozen=True)
class Whole:
    """What an undisturbed run of a verb writes, and how many changes it makes."""

    content: dict[str, bytes]
    before: dict[str, bytes]
    changes: int

    def is_done(self, target: Path) -> bool:
        """True for the whole result, False for what lay there before; else a `Surprise`."""
        restore(target)
        found = _content(target)
        if found == self.content:
            return True
        if found == self.before:
            return False
        names = found.keys() | self.content.keys()
        other = sorted(name for name in names if found.get(name) != self.content.get(name))
        raise Surprise(f"half-written: {', '.join(other[:5])}")


class Surprise(Exception):
    """What a killed verb must not do."""


def write_inputs(folder: Path) -> None:
    """Make in ``folder`` what the verbs read."""
    torch.set_num_threads(1)
    write_images(folder / "images", per_class=40)
    scheduler = DDIMScheduler(**SD_BETAS, prediction_type="epsilon")
    pipeline(folder / "sd", text_unet(0), scheduler)
    write_vae(folder / "sd" / "vae")
    write_clip(folder / "sd")
    (folder / "lora").mkdir()
    save_file(kohya(text_unet(0)), folder / "lora" / "a.safetensors")
    for command in _INPUTS:
        code, said = life(folder, command)
        if code:
            raise RuntimeError(f"{command}: {said}")


def whole(verb: Verb, inputs: Path, place: Path) -> Whole:
    """Run a verb undisturbed."""
    _lay_out(verb, inputs, place)
    before = _content(place / verb.target)
    code, said = life(place, verb.command, counted := place / ".changes")
    if code:
        raise RuntimeError(f"{verb.command}: {said}")
    return Whole(_content(place / verb.target), before, int(counted.read_text()))


def kill(
    verb: Verb, expected: Whole, inputs: Path, place: Path, rng: random.Random, story: list[str]
) -> None:
    """Kill a verb up to `_MOST_LIVES` times, and let it end; each life is told in ``story``.

    Raises `Surprise`.
    """
    _lay_out(verb, inputs, place)
    target, is_done, command = place / verb.target, False, verb.command
    for _ in range(rng.randint(1, _MOST_LIVES)):
        number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        moment = Moment(number, rng.randint(1, expected.changes))
        code, said = life(place, command, None, moment)
        story.append(f"{command}: {number.name} at change {moment.change}, ended with {code}\n{said}")
        if code not in (0, -moment.number, 128 + moment.number):
            raise Surprise(f"exit code {code} after {moment.number.name}")
        is_done = expected.is_done(target)
        command = f"{verb.command} --resume" if verb.resumes else verb.command
        if code == 0 or (is_done and not verb.resumes):
            break
    if not is_done or verb.resumes:
        code, said = life(place, command)
        story.append(f"{command}: ended with {code}\n{said}")
        if code:
            raise Surprise(f"exit code {code} when run again")
        if not expected.is_done(target):
            raise Surprise("nothing is written when run again")
        left = [path.name for path in target.parent.iterdir() if path.name.startswith(f".{target.name}.")]
        if left:
            raise Surprise(f"left beside: {', '.join(one.split('-')[0] for one in sorted(left))}")


def _lay_out(verb: Verb, inputs: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    for name in verb.inputs:
        shutil.copytree(inputs / name, place / name)


_SECONDS = re.compile(rb'"seconds": [0-9.]+|"(expert|router).json": "[0-9a-f]+"')
"""How long a training took, in its record, and that record's hash in a manifest."""


def _content(target: Path) -> dict[str, bytes]:
    """Bytes by name of a file, or of a folder's visible files without runs; empty where there is nothing."""
    paths = sorted(target.rglob("*")) if target.is_dir() else [target]
    found = {}
    for path in (path for path in paths if path.is_file()):
        name = path.relative_to(target.parent)
        if not any(part.startswith(".") or part.endswith(".run") for part in name.parts):
            found[str(name)] = _SECONDS.sub(b"", path.read_bytes())
    return found


def life(
    place: Path, command: str, counted: Path | None = None, moment: Moment | None = None
) -> tuple[int, str]:
    """Run a command in ``place``, in a process of its own; its exit code (minus a signal), and its words.

    ``counted`` gets the number of its changes of files; it gets a signal at ``moment``. Raises `Surprise` for
    one that does not end.
    """
    place.mkdir(parents=True, exist_ok=True)
    words = place / ".words"
    # It may be killed before it has said anything.
    words.touch()
    child = os.fork()
    if child == 0:
        _live(place, command, words, counted, moment)
    end = time.monotonic() + SECONDS
    ended = status = 0
    while True:
        if not ended:
            ended, status = os.waitpid(child, os.WNOHANG)
        if ended and not _lives(child):
            return os.waitstatus_to_exitcode(status), words.read_text(errors="replace")[-3000:]
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            raise Surprise(f"does not end within {SECONDS} s")
        time.sleep(0.005)


def _lives(group: int) -> bool:
    """True while a process of a group lives: those that a killed one has started notice it and save."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _live(place: Path, command: str, words: Path, counted: Path | None, moment: Moment | None) -> None:
    code = 70
    try:
        os.setpgrp()
        out = os.open(words, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.chdir(place)
        sys.argv = ["hddm", *command.split()]
        changes = 0

        def hook(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal changes
            is_opened = (
                name == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            )
            if name in CHANGES or is_opened:
                changes += 1
                if moment is not None and changes == moment.change:
                    os.kill(os.getpid(), moment.number)

        sys.addaudithook(hook)
        try:
            app()
        except SystemExit as ended:
            code = int(ended.code or 0) if not isinstance(ended.code, str) else 1
        if counted is not None:
            counted.write_text(str(changes))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
    finally:
        os._exit(code)
