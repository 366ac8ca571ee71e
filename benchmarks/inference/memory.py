"""Peak memory of an ensemble on disk by what is done with experts that do not run; a fresh process each."""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging

from benchmarks.inference.models import EvenRouter, Settings, Size, random_expert, random_router
from benchmarks.timing import DTYPES, between, now
from hddm.ensemble import Ensemble
from hddm.experts.assembly import assemble
from hddm.experts.expert_folders import save_expert
from hddm.experts.loading import load
from hddm.experts.record_folders import save_router
from hddm.experts.records import RouterRecord
from hddm.routers import Router
from hddm.sampling import integrate, time_grid
from hddm.utils.machine import has_own_memory
from hddm.utils.records import WEIGHTS
from hddm.velocity import TIME_SCALE

ALL, FEW = "all", "few"
STORED_DTYPE = "float32"
INTERVAL = 0.002
_MARK = "measured: "


@dataclass(frozen=True)
class Case:
    """An ensemble folder and how it is loaded; ``room`` is for how many experts, None for no limit."""

    folder: str
    offload: str
    room: int | None = None


CASES = (
    Case(FEW, "none"),
    Case(ALL, "none"),
    Case(ALL, "ram"),
    Case(ALL, "disk"),
    Case(ALL, "disk", room=2),
)


CAST_CASES = (CASES[0], CASES[1], CASES[3])
"""Those in another dtype than that of the files, where weights are copies."""


@dataclass(frozen=True)
class Memory:
    """Bytes: peaks above the imports, and before any expert ran, and seconds of the last step.

    On the CPU ``resident`` is the peak of all resident pages, those of mapped files too (VmHWM), ``own`` that
    of anonymous pages (RssAnon, sampled). On an accelerator both are what its allocator gave out at most.
    """

    resident: int
    resident_opened: int
    own: int
    own_opened: int
    seconds_a_step: float


def measure_memory(
    settings: Settings, device: str, dtype: str, work: Path
) -> tuple[int, list[dict[str, Any]]]:
    """Bytes of an expert's file, and what each case took."""
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=work) as place:
        size, router = write_ensembles(settings, Path(place))
        for case in CASES if dtype == STORED_DTYPE else CAST_CASES:
            limit = None if case.room is None else case.room * size + router
            ask: dict[str, Any] = {
                "path": f"{place}/{case.folder}",
                "offload": case.offload,
                "max_memory": limit,
            }
            ask |= {"settings": asdict(settings), "device": device, "dtype": dtype}
            rows.append({**asdict(case), "max_memory": limit, **asdict(_in_fresh_process(ask))})
            print(f"{dtype}, {case}: {rows[-1]['resident'] / 1e6:,.0f} MB", flush=True)
    return size, rows


def write_ensembles(settings: Settings, place: Path) -> tuple[int, int]:
    """Write the ensemble of all experts and that of a few; bytes of an expert's and of the router's file."""
    shape, count = (settings.channels, settings.memory_side, settings.memory_side), settings.experts
    folders = []
    for k in range(count):
        folders.append(place / "experts" / str(k))
        folders[-1].mkdir(parents=True)
        save_expert(folders[-1], random_expert(settings.stored, shape, settings.patch, k, count))
    router = place / "router"
    router.mkdir()
    record = RouterRecord(
        time_scale=TIME_SCALE,
        sample_shape=shape,
        shard_hashes=tuple(f"shard {k}" for k in range(count)),
        shard_images=(1000,) * count,
    )
    save_router(router, random_router(settings.router, shape, settings.patch, count), record)
    assemble(folders, place / ALL, router, strategy="top-1")
    assemble(folders[: settings.few], place / FEW, router, strategy="top-1")
    return (folders[0] / WEIGHTS).stat().st_size, (router / WEIGHTS).stat().st_size


def _in_fresh_process(ask: dict[str, Any]) -> Memory:
    command = [sys.executable, "-m", "benchmarks.inference.memory", json.dumps(ask)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(_MARK))
    return Memory(**json.loads(line.removeprefix(_MARK)))


@torch.no_grad()
def memory_of(ask: dict[str, Any]) -> Memory:
    """Load the ensemble, sample with every expert, and report; for a process of its own."""
    device, dtype = ask["device"], DTYPES[ask["dtype"]]
    sizes: dict[str, Any] = {
        key: Size(**value) if isinstance(value, dict) else value
        for key, value in ask["settings"].items()
    }
    settings = Settings(**sizes)
    shape = (settings.channels, settings.memory_side, settings.memory_side)
    times = time_grid(settings.memory_steps)
    x = torch.randn(settings.memory_batch, *shape).to(device)
    # What libraries take when a network of this kind first runs is no part of an ensemble.
    small = random_expert(Size(64, 2, 2), shape, settings.patch).network.to(device, dtype)
    small(x.to(dtype), torch.zeros(len(x), device=device))
    del small
    with peak(device) as first:
        pass
    with peak(device) as opened:
        model = load_even(
            ask["path"], dtype, device, offload=ask["offload"], max_memory=ask["max_memory"]
        )
        model.weights(x, torch.ones(len(x)))
    with peak(device) as running:
        integrate(model, x, times)
        began = now(device)
        integrate(model, x, times[:2])
        seconds = between(began, now(device)).seconds
    resident, own = (
        [max(found[i] for found in peaks) - first[i] for peaks in ((opened, running), (opened,))]
        for i in (0, 1)
    )
    return Memory(resident[0], resident[1], own[0], own[1], seconds)


def load_even(path: str, dtype: torch.dtype, device: str, **options: Any) -> Ensemble:
    """`hddm.load` of an ensemble, whose router then shares samples out evenly."""
    model = load(path, dtype, device, **options)
    assert isinstance(model, Ensemble)
    assert isinstance(model.router, Router)
    assert isinstance(model.router.network, torch.nn.Module)
    model.router.network = EvenRouter(model.router.network)
    return model


@contextmanager
def peak(device: str) -> Iterator[list[int]]:
    """Gives a list that holds, after the block, the peaks of resident and of own memory in it, in bytes."""
    found: list[int] = []
    if has_own_memory(torch.device(device)):
        torch.accelerator.reset_peak_memory_stats()
        yield found
        found += [torch.accelerator.max_memory_allocated()] * 2
        return
    # 5 sets the peak back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    own, stop = [_status("RssAnon:")], threading.Event()

    def watch() -> None:
        while not stop.wait(INTERVAL):
            own.append(_status("RssAnon:"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield found
    stop.set()
    watcher.join()
    found += [_status("VmHWM:"), max(own)]


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    logging.set_verbosity_error()
    print(_MARK + json.dumps(asdict(memory_of(json.loads(sys.argv[1])))))
