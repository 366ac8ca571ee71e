"""Stages of the kit: what one finds, how each runs in a process of its own, and which are not run again.

A stage returns a `Result` of `Figure` objects. One that cannot run here raises `NotRun` with the reason; one
that raises anything else has failed. Either way the next stage runs.
"""

import hashlib
import json
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.figures import MISSED, Figure, Result
from benchmarks.harness import apart, plain
from hddm.utils.files import read_json, write_json
from hddm.utils.machine import room_on
from hddm.utils.processes import compute_environment, environment
from hddm.utils.work import machine

FAILED, NOT_RUN = "failed", "not run"
"""Outcomes of a stage beside those of its result."""
ROOT = Path(__file__).parents[2]
_CODE = ("hddm", "cli", "benchmarks", "tests")


class NotRun(Exception):
    """A stage cannot run here; the message is the reason."""


@dataclass(frozen=True)
class Kit:
    """Settings of a start, the same for all stages.

    Args:
        device: ``cpu`` or ``cuda``.
        is_real: download published models; otherwise stand-ins of a local hub.
        work: downloads, experts and finished stages.
        samples: pictures for the FID.
        statistics: file or address of ADM's reference statistics.
        images: folder of images that are partitioned.
        threads: of each process.
        addresses: environment of processes that use the hub.
    """

    device: str
    is_real: bool
    work: Path
    samples: int = 10_000
    statistics: str | None = None
    images: Path | None = None
    threads: int = 1
    addresses: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        """True for every device but the CPU."""
        return torch.device(self.device).type != "cpu"


@dataclass(frozen=True)
class Stage:
    """A function of the kit's settings, by its name and the group that it belongs to.

    ``uses`` are settings that change what it finds, beside device and hub; ``identity`` is all else that
    does. One that ``needs_gpu`` is not begun on a CPU, and one of published models not on a GPU with fewer
    gigabytes of ``memory``.
    """

    name: str
    group: str
    title: str
    run: Callable[[Kit], Result]
    uses: Sequence[str] = ()
    identity: str = ""
    needs_gpu: bool = False
    memory: float = 0.0


@dataclass(frozen=True)
class Finished:
    """A stage with its outcome, its seconds and the time at which it ended.

    ``processor`` is what it took of all cores in seconds, with all processes that it waited for.
    """

    stage: str
    group: str
    title: str
    outcome: str
    result: Result
    reason: str = ""
    seconds: float = 0.0
    processor: float = 0.0
    ended: str = ""
    was_kept: bool = False


def run_stages(
    stages: Iterable[Stage], kit: Kit, again: Sequence[str] = (), is_apart: bool = True
) -> Iterable[Finished]:
    """Run stages one after the other; those that are done for equal settings and code are read instead.

    ``again`` names stages or groups that are run in any case. A stage that failed or could not run is always
    tried again. Unless ``is_apart``, all run in this process.
    """
    for stage in stages:
        path = kit.work / "stages" / f"{stage.name}.json"
        key = _key(stage, kit)
        kept = None
        if stage.name not in again and stage.group not in again:
            kept = _read(path, key)
        if kept is not None:
            yield kept
            continue
        finished = _run(stage, kit, is_apart)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": key, **plain(asdict(finished))})
        yield finished


def _run(stage: Stage, kit: Kit, is_apart: bool) -> Finished:
    began, own = time.perf_counter(), _own_processor()
    reason, result, processor = "", Result(), 0.0
    try:
        reason = lack_of(stage, kit)
        if not reason and is_apart:
            with environment(dict(kit.addresses)):
                result, reason, processor = in_process(kit, stage.run)
        elif not reason:
            result, reason = guarded(stage.run, kit)
        outcome = NOT_RUN if reason else result.outcome
    # Whatever a stage ends with, the others go on.
    except Exception as error:
        traceback.print_exception(error)
        first = next(iter(str(error).splitlines()), "")
        outcome, reason = FAILED, f"{type(error).__name__}: {first}"
    return Finished(
        stage.name,
        stage.group,
        stage.title,
        outcome,
        result,
        reason,
        round(time.perf_counter() - began, 1),
        round(processor + _own_processor() - own, 1),
        time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def lack_of(stage: Stage, kit: Kit) -> str:
    """What this machine lacks for a stage; empty where nothing is known to lack."""
    if stage.needs_gpu and not kit.is_gpu:
        return "needs a GPU"
    room = room_on(torch.device(kit.device)) if kit.is_gpu and kit.is_real else None
    if room is None or room.total >= 1e9 * stage.memory:
        return ""
    return f"needs {stage.memory:g} GB, and {room.name} has {room.total / 1e9:.0f} GB"


def in_process(kit: Kit, run: Callable[[Kit], Result]) -> tuple[Result, str, float]:
    """`guarded` in a process of its own, and the seconds of the processor that this took.

    On a CPU it is forked from one that has imported everything, since most of a small stage would be imports.
    CUDA does not survive a fork once a package has looked for devices.
    """
    if kit.is_gpu:
        return apart(kit.threads, _with_processor, run, kit)
    multiprocessing.set_forkserver_preload(["benchmarks.acceptance.plan"])
    server = multiprocessing.get_context("forkserver")
    variables = compute_environment(kit.threads)
    with environment(variables), ProcessPoolExecutor(1, server) as pool:
        return pool.submit(_with_processor, run, kit).result()


def _with_processor(run: Callable[[Kit], Result], kit: Kit) -> tuple[Result, str, float]:
    result, reason = guarded(run, kit)
    used = os.times()
    return result, reason, _own_processor() + used.children_user + used.children_system


def _own_processor() -> float:
    """Seconds of the processor that this process has taken."""
    used = os.times()
    return used.user + used.system


def guarded(run: Callable[[Kit], Result], kit: Kit) -> tuple[Result, str]:
    """Call a stage; a result, or the reason why it cannot run here."""
    try:
        return run(kit), ""
    except NotRun as error:
        return Result(), str(error)
    except Exception as error:
        if reason := refusal_of_hub(error):
            return Result(), reason
        raise


def refusal_of_hub(error: BaseException) -> str | None:
    """Why the hub gave nothing: a token, or the network; None for an error of another kind."""
    from huggingface_hub import errors

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, errors.GatedRepoError):
            return "needs a token: accept the model's terms on its page, and run hf auth login"
        if isinstance(seen, errors.RepositoryNotFoundError):
            return "the hub shows no such repository; a private one needs a token"
        if isinstance(seen, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
            return "no network: the hub cannot be reached"
        is_of_http = type(seen).__module__.startswith(("httpx", "httpcore", "requests"))
        if is_of_http and not isinstance(seen, errors.HfHubHTTPError):
            return "no network: the hub cannot be reached"
        # What was handled when it was raised need not be its cause.
        seen = seen.__cause__
    return None


def _key(stage: Stage, kit: Kit) -> str:
    """Hash of all that a stage's figures depend on: settings, code, device and versions of packages."""
    settings = {name: str(getattr(kit, name)) for name in ("device", "is_real", *stage.uses)}
    made_on = machine()
    versions = {name: made_on[name] for name in ("accelerator", "packages", "python")}
    content = [stage.name, stage.identity, settings, versions, code_digest()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def code_digest() -> str:
    """Hash of all Python files of the library, its tests and benchmarks."""
    digest = hashlib.sha256()
    for folder in _CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, key: str) -> Finished | None:
    """A finished stage; None for one of other settings or code, and for one that must be tried again."""
    if not path.is_file():
        return None
    content = dict(read_json(path))
    if content.pop("key", None) != key or content["outcome"] in (FAILED, NOT_RUN):
        return None
    result = dict(content.pop("result"))
    result["figures"] = [Figure(**one) for one in result["figures"]]
    return Finished(**{**content, "result": Result(**result), "was_kept": True})


def costs(finished: Iterable[Finished], most: int = 5) -> str:
    """Seconds of the processor of all stages, and the ``most`` that took most of them, in a line."""
    stages = sorted(finished, key=lambda one: one.processor, reverse=True)
    longest = ", ".join(f"{one.stage} {one.processor:.0f} s" for one in stages[:most])
    return f"{sum(one.processor for one in stages):.0f} s of the processor; most took {longest}"


def has_problem(finished: Iterable[Finished]) -> bool:
    """True if a stage failed or missed a goal."""
    return any(one.outcome in (FAILED, MISSED) for one in finished)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; infinite for other shapes."""
    if found.shape != expected.shape:
        return math.inf
    wide, other = found.double().cpu(), expected.double().cpu()
    return float((wide - other).norm() / other.norm())
