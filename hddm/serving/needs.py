"""What a service will need: each of its workers, and its front."""

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hddm.conditions import Conditions
from hddm.experts.loading import open_ensemble
from hddm.networks.programs.permission import programs_allowed
from hddm.pipelines.needs import (
    TOO_LARGE,
    Sampling,
    activations,
    beside_experts,
    decoding,
    measure_decoding,
    measure_experts,
    measure_router,
    not_compiled,
    of_weights,
    said_before,
)
from hddm.pipelines.networks_measured import Measured, kind_of
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.running import shape_of
from hddm.sampling import batches, plan
from hddm.serving.placement import (
    FRONT,
    GPUS,
    Placement,
    placed_on,
    refuse_lack,
    settings_for,
)
from hddm.serving.service import names_of
from hddm.settings import ServeSettings
from hddm.utils.errors import counted
from hddm.utils.machine import gpu_rooms, has_own_memory, main_memory, resident_bytes, room_on
from hddm.utils.needs import Effort, Memory, Needs, together
from hddm.utils.progress import Progress
from hddm.utils.ray_workers import LOCAL
from hddm.utils.records import WHOLE
from hddm.utils.tensors import available_device, dtype_on
from hddm.velocity import VelocityField

ELSEWHERE = "the workers run on other machines"
GUIDED = 2.0
"""A guidance scale that requests may have; all but 1 take the same."""

REMEDY = "pass `quantize` int8, or fewer `num_replicas`, or workers on other machines (`ray`)"
GPU_REMEDY = "pass `quantize` int8, a smaller `batch_size`, or fewer `num_replicas`"

log = logging.getLogger(__name__)


def needs_of_service(
    folder: Path, settings: ServeSettings, placement: Placement, address: str = LOCAL
) -> tuple[list[Needs], list[str]]:
    """Measure what `hddm.serving.service.serve` needs, and start nothing.

    Returns:
        The needs of one worker of each expert and of the front, and lines about all that share a memory: that
        of each GPU, and main memory.

    Raises:
        HddmError: as `serve`, for an ensemble that cannot be opened, a ``placement`` of unknown names, and
            GPUs that are not there.
    """
    with programs_allowed(settings.allow_program):
        return _needs_of(folder, settings, placement, address)


def _needs_of(
    folder: Path, settings: ServeSettings, placement: Placement, address: str
) -> tuple[list[Needs], list[str]]:
    base = resident_bytes()
    names = names_of(folder)
    placement.check(names)
    if address != LOCAL:
        return _elsewhere(folder, settings, placement, names, base), []
    rooms = gpu_rooms()
    gpus = len(rooms) if settings.device in GPUS else 0
    resources = placement.of_all(names, gpus)
    processes = placement.processes(names)
    parts = [{"num_gpus": resources[name]["num_gpus"]} for name in processes]
    refuse_lack({"GPU": len(rooms)}, parts)
    with Progress(None, "measure", is_drawn=False):
        found = dict[str, Needs]()
        measured = dict[torch.device, dict[str, Measured]]()
        for name in [FRONT, *names]:
            own = settings_for(settings, resources[name])
            device = available_device(own.device)
            said_before(device, own, f" of {name}")
            if name == FRONT:
                found[name] = _front(folder, own, device, base)
                continue
            kinds, number = measured.setdefault(device, {}), placement.copies(name)
            found[name] = _worker(folder, names.index(name), own, device, base, kinds)
            found[name] = replace(found[name], what=_worker_text(name, number))
    lines = []
    placed = placed_on(len(rooms), [one["num_gpus"] for one in parts]) or []
    for k, room in enumerate(rooms):
        there = [name for name, places in zip(processes, placed, strict=False) if k in places[:1]]
        if there:
            total = sum(found[name].on_device for name in there)
            what = f"GPU {k} with {', '.join(there)}, without what CUDA itself takes for each"
            lines += together(what, total, room, GPU_REMEDY)
    total = sum(found[name].in_main_memory for name in processes)
    lines += together("all processes together", total, main_memory(), REMEDY)
    return [found[name] for name in (*names, FRONT)], lines


def _elsewhere(
    folder: Path, settings: ServeSettings, placement: Placement, names: Sequence[str], base: int
) -> list[Needs]:
    """The needs of workers and of the front on other machines: weights, which are counted."""
    device = torch.device("cpu")
    dtype = dtype_on(device, settings.dtype)
    experts = open_ensemble(folder, dtype).expert_set(device, dtype, shares=False)
    experts.prepare(not_compiled(settings))
    process = Memory("process", base, "Python and libraries", True, is_on_host=True)
    found = []
    for name, field in zip(names, experts.fields(), strict=True):
        memory = [*of_weights(experts, _with_weak(field)), process]
        alone = Needs(_worker_text(name, placement.copies(name)), memory, (), None)
        found.append(_with_calls(alone, _sampling(field, settings), settings, {}, ELSEWHERE))
    pipeline = HDDMPipeline.from_pretrained(folder, dtype=dtype)
    memory = [*beside_experts(pipeline, device), process]
    memory.append(Memory("decoding", None, ELSEWHERE, is_passing=True))
    work = [Effort("decoding, PNG files", None, 1, "image", ELSEWHERE)]
    return [*found, Needs(FRONT, memory, work, None)]


def _worker_text(name: str, number: int) -> str:
    return f"a worker of {name} ({counted(number, 'worker')})"


def _with_weak(field: VelocityField) -> list[VelocityField]:
    """The fields whose weights the worker of a field holds."""
    return [field] if field.weak is None else [field, field.weak]


def _worker(
    folder: Path,
    index: int,
    settings: ServeSettings,
    device: torch.device,
    base: int,
    measured: dict[str, Measured],
) -> Needs:
    """The needs of a worker of an expert; ``measured`` are the networks that ran on the device already."""
    dtype = dtype_on(device, settings.dtype)
    # As in a worker: alone in its process, an adapter is merged.
    experts = open_ensemble(folder, dtype).expert_set(device, dtype, shares=False)
    experts.prepare(not_compiled(settings))
    field = experts.fields()[index]
    process = Memory("process", base, "Python and libraries", True, is_on_host=True)
    memory = [*of_weights(experts, _with_weak(field)), process]
    host = main_memory() if has_own_memory(device) else None
    alone = Needs("", memory, (), room_on(device), host)
    reason = "" if alone.fits else TOO_LARGE
    return _with_calls(alone, _sampling(field, settings), settings, measured, reason)


def _sampling(field: VelocityField, settings: ServeSettings) -> Sampling:
    """A full batch of a worker, with guidance where its expert can be guided by condition."""
    alone = copy.copy(field)
    # One of a pair is measured as if it covered all noise levels.
    alone.noise_range = WHOLE
    nulls, number = field.null_conditions, settings.batch_size
    is_guided = bool(nulls) and field.inner_guidance == 1
    how = plan(alone, guidance=GUIDED if is_guided else 1.0)
    given = {name: null.expand(number, *null.shape) for name, null in nulls.items()}
    return Sampling.of(how, list(batches(how, range(number), Conditions(given), number)))


def _with_calls(
    needs: Needs,
    found: Sampling,
    settings: ServeSettings,
    measured: dict[str, Measured],
    reason: str,
) -> Needs:
    """The needs of a worker, with its calls: measured once for experts of one kind.

    They are not measured where there is a ``reason``.
    """
    number = len(found.batches[0].rows)
    calls = found.greatest.of_experts / number
    unit, guided = "calls of one image", found.largest > number
    note = f"one image of {found.how.steps} steps{', with guidance' if guided else ''}"
    note += ", without `compile`" if settings.compile else ""
    if reason:
        memory = [*needs.memory, Memory("activations", None, reason, is_passing=True)]
        return Needs(
            needs.what, memory, [Effort("networks", None, calls, unit, reason)], needs.device
        )
    kind = kind_of(found.fields[0])
    if kind not in measured:
        measured[kind] = measure_experts(found, needs.left)[kind]
    own = measured[kind]
    memory = [*needs.memory, activations({kind: own}, found.largest)]
    work = [Effort("networks", own.each(found.largest), calls, unit, note)]
    remedies = ["pass a smaller `batch_size`", "pass `quantize` int8"]
    return Needs(needs.what, memory, work, needs.device, needs.host, remedies)


def _front(folder: Path, settings: ServeSettings, device: torch.device, base: int) -> Needs:
    """The needs of the front, with its networks on a device."""
    pipeline = HDDMPipeline.from_pretrained(folder, dtype=dtype_on(device, settings.dtype))
    memory = beside_experts(pipeline, device)
    memory.append(Memory("process", base, "Python and libraries", True, is_on_host=True))
    room, most = room_on(device), settings.batch_size
    host = main_memory() if has_own_memory(device) else None
    lasting = Needs(FRONT, memory, (), room, host)
    work = []
    if lasting.fits:
        free = lasting.left
        pipeline.to(device)
        model = pipeline.ensemble
        shape = shape_of(model, 0)
        if isinstance(pipeline.router, nn.Module):
            routed = measure_router(model, shape, most, free)
            work.append(Effort("router", routed.each(most), 1, "call of one image"))
        measured = measure_decoding(pipeline, 0, shape, most, free)
        memory.append(decoding(measured, most))
        work.append(Effort("decoding, PNG files", measured.each(most), 1, "image"))
        if pipeline.takes_prompts:
            started = time.perf_counter()
            pipeline.encode("a photograph")
            work.append(Effort("a prompt", time.perf_counter() - started, 1, "prompt"))
    return Needs(FRONT, memory, work, room, host, ["pass a smaller `batch_size`"])
