"""What a service will need: each of its workers, and its front."""

import copy
import logging
import time
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
    of_weights,
)
from hddm.pipelines.networks_measured import Measured, kind_of
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.running import shape_of
from hddm.sampling import batches, plan
from hddm.serving.placement import FRONT, Placement
from hddm.serving.service import names_of
from hddm.settings import ServeSettings
from hddm.utils.errors import counted
from hddm.utils.machine import has_own_memory, main_memory, resident_bytes, room_on
from hddm.utils.needs import Effort, Memory, Needs, together
from hddm.utils.progress import Progress
from hddm.utils.ray_workers import LOCAL
from hddm.utils.records import WHOLE
from hddm.utils.tensors import available_device, dtype_on
from hddm.velocity import VelocityField

ELSEWHERE = "the workers run on other machines"
GUIDED = 2.0
"""A guidance scale that requests may have; all but 1 take the same."""

log = logging.getLogger(__name__)


def needs_of_service(
    folder: Path, settings: ServeSettings, placement: Placement, address: str = LOCAL
) -> tuple[list[Needs], list[str]]:
    """Measure what `hddm.serving.service.serve` needs, and start nothing.

    Returns:
        The needs of one worker of each expert and of the front, and lines about all of them together, where
        they share one memory.

    Raises:
        HddmError: as `serve`, for an ensemble that cannot be opened and for a ``placement`` of unknown names.
    """
    base = resident_bytes()
    with programs_allowed(settings.allow_program):
        names = names_of(folder)
    placement.check(names)
    is_here = address == LOCAL
    device = available_device(settings.device) if is_here else torch.device("cpu")
    dtype = dtype_on(device, settings.dtype)
    log.info("dry run: measures calls of networks on %s", device if is_here else "no device")
    with Progress(None, "measure", is_drawn=False):
        front = _front(folder, settings, base, is_here)
        # As in a worker: alone in its process, an adapter is merged.
        with programs_allowed(settings.allow_program):
            opened = open_ensemble(folder, dtype)
        experts = opened.expert_set(device, dtype, shares=False)
        experts.prepare(settings)
        measured = dict[str, Measured]()
        workers = []
        for name, field in zip(names, experts.fields(), strict=True):
            number = placement.copies(name)
            what = f"a worker of {name} ({counted(number, 'worker')})"
            process = Memory("process", base, "Python and libraries", True, is_on_host=True)
            fields = [field] if field.weak is None else [field, field.weak]
            memory = [*of_weights(experts, fields), process]
            host = main_memory() if is_here and has_own_memory(device) else None
            room = room_on(device) if is_here else None
            counted_alone = Needs(what, memory, (), room, host)
            own = _with_calls(counted_alone, _sampling(field, settings), measured, is_here)
            workers.append((number, own))
            for network in experts.stored:
                experts.shelf.forget(network)
    needs = [one for _, one in workers]
    if not is_here or has_own_memory(device):
        return [*needs, front], []
    remedy = "pass `quantize` int8, or fewer `num_replicas`, or workers on other machines (`ray`)"
    lines = together("all processes together", [*workers, (1, front)], main_memory(), remedy)
    return [*needs, front], lines


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
    needs: Needs, found: Sampling, measured: dict[str, Measured], is_here: bool
) -> Needs:
    """The needs of a worker, with its calls: measured once for experts of one kind."""
    number = len(found.batches[0].rows)
    calls = found.greatest.of_experts / number
    unit, guided = "calls of one image", found.largest > number
    note = f"one image of {found.how.steps} steps{', with guidance' if guided else ''}"
    reason = ELSEWHERE if not is_here else "" if needs.fits else TOO_LARGE
    if reason or needs.device is None:
        memory = [*needs.memory, Memory("activations", None, reason, is_passing=True)]
        return Needs(
            needs.what, memory, [Effort("networks", None, calls, unit, reason)], needs.device
        )
    kind = kind_of(found.fields[0])
    if kind not in measured:
        free = needs.device.free - needs.on_device
        measured[kind] = measure_experts(found, free)[kind]
    own = measured[kind]
    memory = [*needs.memory, activations({kind: own}, found.largest)]
    work = [Effort("networks", own.each(found.largest), calls, unit, note)]
    remedies = ["pass a smaller `batch_size`", "pass `quantize` int8"]
    return Needs(needs.what, memory, work, needs.device, needs.host, remedies)


def _front(folder: Path, settings: ServeSettings, base: int, is_here: bool) -> Needs:
    """The needs of the front, which runs on a CPU, of this machine or of a cluster."""
    dtype = dtype_on(torch.device("cpu"), settings.dtype)
    pipeline = HDDMPipeline.from_pretrained(folder, dtype=dtype)
    memory = beside_experts(pipeline)
    memory.append(Memory("process", base, "Python and libraries", True))
    room, most = main_memory(), settings.batch_size
    lasting = Needs(FRONT, memory, (), room)
    work = []
    if lasting.fits:
        free = room.free - lasting.on_device
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
    own = room if is_here else None
    return Needs(FRONT, memory, work, own, None, ["pass a smaller `batch_size`"])
