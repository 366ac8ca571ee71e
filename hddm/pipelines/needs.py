"""What samples of a model will need: sizes of its networks, calls that are counted, and some measured."""

import io
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from hddm.call_counts import ROUTER, Calls, Network, count_calls, possible_experts
from hddm.data.images import save_png, to_bytes
from hddm.ensemble import Ensemble
from hddm.experts.ensemble_records import COMPONENTS
from hddm.experts.expert_set import ExpertSet
from hddm.networks.offload import StoredNetwork
from hddm.pipelines.networks_measured import (
    Measured,
    field_at,
    holders_of,
    kind_of,
    measure,
    measure_field,
)
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.pipelines.samples import SamplingRun, planned_on_device, read_model
from hddm.routers import answer_of
from hddm.running import Batch, Plan
from hddm.settings import Computing, SampleSettings
from hddm.utils.machine import bytes_of, has_own_memory, main_memory, resident_bytes, room_on
from hddm.utils.needs import Effort, Memory, Needs
from hddm.utils.progress import Progress
from hddm.utils.tensors import available_device
from hddm.velocity import VelocityField

log = logging.getLogger(__name__)
_PROCESS = "process"
_NOT_COMPILED = "without `compile`, whose minutes at the first step do not count either"
TOO_LARGE = "what is counted above does not fit already"


def needs_of_sampling(source: Path, settings: SampleSettings, grid: bool = False) -> Needs:
    """Measure what `hddm.pipelines.samples.sample_to_folder` needs, and write nothing.

    Raises `HddmError` as that function does before the first image.
    """
    base = resident_bytes()
    pipeline, settings = read_model(source, settings, grid)
    device = available_device(settings.device)
    process = Memory(_PROCESS, base, "Python and libraries", is_about=True, is_on_host=True)
    beside = [*beside_experts(pipeline, device), process]
    room, host = room_on(device), main_memory() if has_own_memory(device) else None
    if host is not None and not Needs("", beside, (), room, host).fits:
        # Nothing comes to a device that has no room for it.
        memory = [Memory("experts", None, TOO_LARGE), *beside]
        memory.append(Memory("activations", None, TOO_LARGE, is_passing=True))
        work = [Effort("networks", None, settings.num_images, "images", TOO_LARGE)]
        remedies = _remedies(pipeline, len(pipeline.experts.stored), settings, None)
        return Needs("sampling", memory, work, room, host, remedies)
    pipeline, how = planned_on_device(pipeline, not_compiled(settings), grid)
    started = time.perf_counter()
    # Texts in the files need hashes of all weights.
    run = SamplingRun(source, pipeline, settings.model_copy(update={"metadata": False}), how)
    encoding = time.perf_counter() - started
    with Progress(None, "measure", is_drawn=False):
        said_before(pipeline.experts.device, settings)
        batches = [batch for _, batch in run.batches()]
        found = Sampling.of(how, batches)
        memory = [*of_weights(pipeline.experts, found.fields), *beside]
        return _measured(pipeline, found, settings, memory, encoding)


AnyComputing = TypeVar("AnyComputing", bound=Computing)


def not_compiled(settings: AnyComputing) -> AnyComputing:
    """The same settings without compiling, which takes minutes, and is no part of what is measured."""
    return settings.model_copy(update={"compile": False})


def said_before(device: torch.device, settings: Computing, of: str = "") -> None:
    """Log what is run to measure it, before that begins: for large images it takes long."""
    without = f"; {_NOT_COMPILED}" if settings.compile else ""
    log.info(
        "dry run: runs each kind of network%s a few times on %s, with one image of the size that is asked "
        "for and with more, which takes about as long as three steps of such an image%s",
        of,
        device,
        without,
    )


@dataclass(frozen=True)
class Sampling:
    """Samples of a plan, and the networks that they run."""

    how: Plan
    batches: Sequence[Batch]
    least: Calls
    greatest: Calls

    @classmethod
    def of(cls, how: Plan, batches: Sequence[Batch]) -> "Sampling":
        """Count the calls of these batches."""
        return cls(how, batches, *count_calls(how, batches))

    @property
    def fields(self) -> list[VelocityField]:
        """The fields of `networks`."""
        return [field_at(self.how.model.experts, one) for one in self.networks]

    @property
    def is_chosen_by_states(self) -> bool:
        """True if the router chooses experts that are not known before."""
        is_kept = self.batches[0].expert is not None
        return not is_kept and self.how.model.num_domains > 1

    @property
    def networks(self) -> list[Network]:
        """The networks that may run."""
        known = self.greatest.networks
        if not self.is_chosen_by_states:
            return known
        found = []
        for k in possible_experts(self.how.model, self.batches):
            found.append(Network(k))
            if any(one.is_weak for one in known):
                found.append(Network(k, True))
        return found

    @property
    def largest(self) -> int:
        """Most samples of one call of a network."""
        experts = [size for one, size in self.greatest.largest.items() if one != ROUTER]
        return max(experts)


def of_weights(experts: ExpertSet, fields: Sequence[VelocityField]) -> list[Memory]:
    """Memory of the weights of those ``fields`` of ``experts`` that run, by where idle ones wait."""
    holders = holders_of(fields)
    shelf = experts.shelf
    total, number = sum(one.size for one in holders), len(holders)
    present = _present(experts, holders)
    is_in_int8 = any(one.is_quantized for one in holders)
    kind = str(experts.dtype).removeprefix("torch.")
    kind = f"int8 and {kind}" if is_in_int8 else kind
    if _are_idle_ones_there(experts, holders):
        return [Memory("experts", total, f"{number} networks in {kind}, all in memory")]
    fitting = number if present == total else _that_fit([one.size for one in holders], present)
    rows = [Memory("experts", present, f"{fitting} of {number} networks at once, in {kind}")]
    if shelf.offload == "ram":
        idle = sum(one.full_size for one in holders)
        note = f"{number} networks, `offload` ram"
        rows.append(Memory("idle experts", idle, note, is_on_host=True))
    return rows


def _present(experts: ExpertSet, holders: Sequence[StoredNetwork]) -> int:
    """Bytes of these weights that are on the device at once."""
    total = sum(one.size for one in holders)
    # The budget depends on it.
    experts.shelf.look_for_room()
    budget = experts.shelf.budget
    return total if budget is None else min(total, budget)


def _are_idle_ones_there(experts: ExpertSet, holders: Sequence[StoredNetwork]) -> bool:
    """True if idle experts wait where they run: the device is the main memory, and holds the same tensors."""
    is_same = experts.shelf.offload == "ram" and not has_own_memory(experts.device)
    return is_same and not any(one.is_quantized for one in holders)


def _take_turns(experts: ExpertSet, fields: Sequence[VelocityField]) -> bool:
    """True if the weights of these fields come to the device again and again."""
    holders = holders_of(fields)
    total = sum(one.size for one in holders)
    return _present(experts, holders) < total and not _are_idle_ones_there(experts, holders)


def _that_fit(sizes: Sequence[int], room: int) -> int:
    """How many of these sizes fit into a room, largest first."""
    number, taken = 0, 0
    for size in sorted(sizes, reverse=True):
        taken += size
        if taken > room:
            break
        number += 1
    return number


def beside_experts(pipeline: HDDMPipeline, device: torch.device) -> list[Memory]:
    """Memory of router, VAEs and text encoders on a ``device``, by what the pipeline decides for it."""
    comes_and_goes = pipeline.comes_and_goes(device)
    at_once = pipeline.beside_experts(comes_and_goes)
    rows = []
    for name in ("router", *COMPONENTS):
        part = getattr(pipeline, name)
        if not isinstance(part, nn.Module):
            continue
        size = bytes_of(part.parameters()) + bytes_of(part.buffers())
        shown = name.replace("_", " ")
        is_visitor = comes_and_goes and any(part is one for one in pipeline.visitors)
        if any(part is one for one in at_once):
            note = "the largest of what comes and goes" if is_visitor else ""
            rows.append(Memory(shown, size, note))
        if is_visitor and has_own_memory(device):
            rows.append(Memory(f"{shown}, idle", size, "comes while it runs", is_on_host=True))
    return rows


def _measured(
    pipeline: HDDMPipeline,
    found: Sampling,
    settings: SampleSettings,
    memory: list[Memory],
    encoding: float,
) -> Needs:
    """Measure calls, where the weights fit, and put all together."""
    device = pipeline.experts.device
    room = room_on(device)
    host = main_memory() if has_own_memory(device) else None
    lasting = Needs("", memory, (), room, host)
    if not lasting.fits:
        memory.append(Memory("activations", None, TOO_LARGE, is_passing=True))
        calls = found.greatest.of_experts
        work = [Effort("networks", None, calls, "calls of one image", TOO_LARGE)]
        return Needs(
            "sampling",
            memory,
            work,
            room,
            host,
            _remedies(pipeline, len(found.networks), settings, None),
        )
    free, how, kind = lasting.left, found.how, found.batches[0].kind
    work = []
    if settings.prompts:
        work.append(Effort("prompts", encoding, 1, "time"))
    kinds = measure_experts(found, free)
    memory.append(activations(kinds, found.largest))
    work += _of_experts(pipeline.experts, found, kinds, settings)
    routed = found.greatest.largest.get(ROUTER)
    if routed is not None and isinstance(pipeline.router, nn.Module):
        seconds = measure_router(how.model, how.shape_of(0), routed, free).each(routed)
        number = found.greatest.of_router
        work.append(Effort("router", seconds, number, "calls of one image"))
    if settings.output_type != "latent":
        most = max(len(batch.rows) for batch in found.batches)
        decoded = measure_decoding(pipeline, kind, how.shape_of(kind), most, free)
        memory.append(decoding(decoded, most))
        each = decoded.each(most)
        work.append(Effort("decoding, PNG files", each, settings.num_images, "images"))
    # Libraries come in with the first calls, and torch keeps some of what it frees.
    alive = 0
    if host is None:
        alive = sum(one.size or 0 for one in memory if one.name != _PROCESS and not one.is_passing)
    grown = resident_bytes() - alive
    for place, one in enumerate(memory):
        if one.name == _PROCESS:
            memory[place] = replace(one, size=max(one.size or 0, grown))
    most = _most_that_fit(found, kinds, free)
    remedies = _remedies(pipeline, len(found.networks), settings, most)
    return Needs("sampling", memory, work, room, host, remedies)


def activations(kinds: Mapping[str, Measured], largest: int) -> Memory:
    """Memory of a call of ``largest`` samples, of the network that takes most."""
    size = max(one.memory.at(largest) for one in kinds.values())
    samples = next(iter(kinds.values())).memory.numbers
    note = f"a call of {largest}, measured with {samples}"
    return Memory("activations", round(size), note, is_about=True, is_passing=True)


def decoding(measured: Measured, most: int) -> Memory:
    """Memory of decoding so many images at once."""
    size, note = round(measured.memory.at(most)), f"{most} images at once"
    return Memory("decoding", size, note, is_about=True, is_passing=True)


def _of_experts(
    set_of: ExpertSet, found: Sampling, kinds: Mapping[str, Measured], settings: Computing
) -> list[Effort]:
    """Time of reading weights, and of the networks' calls."""
    networks, samples = found.networks, found.greatest.samples
    experts = found.how.model.experts
    total = found.greatest.of_experts
    shares = {one: samples.get(one, 0.0) / total for one in networks}
    if found.is_chosen_by_states:
        # Who is chosen is not known, only how many are.
        shares = dict.fromkeys(networks, 1 / len(networks))
    seconds = 0.0
    for network, share in shares.items():
        own = kinds[kind_of(field_at(experts, network))]
        seconds += share * own.each(found.largest)
    number = len(holders_of(found.fields))
    opening = sum(one.opening for one in kinds.values()) / len(kinds)
    sizes = next(iter(kinds.values())).seconds
    note = f"measured with {max(sizes.known)} of {found.largest} at once"
    least = found.least.of_experts
    if least != total:
        note += f"; {least:,} to {total:,} calls, as the router decides"
    if settings.compile:
        note += "; without `compile`"
    work = [Effort("reading weights", opening, number, "networks")]
    if found.is_chosen_by_states and _take_turns(set_of, found.fields):
        reason = "experts that are mixed take turns on the device at every step"
        work = [Effort("reading weights", None, number, "networks", reason)]
    return [*work, Effort("networks", seconds, total, "calls of one image", note)]


def _most_that_fit(found: Sampling, kinds: Mapping[str, Measured], free: int) -> int:
    """Most images at once whose calls fit ``free`` bytes."""
    batch = max(len(batch.rows) for batch in found.batches)
    each = found.largest / batch
    number = batch
    while number > 1:
        needed = max(one.memory.at(round(number * each)) for one in kinds.values())
        if needed <= free:
            break
        number //= 2
    return number


def _remedies(
    pipeline: HDDMPipeline, networks: int, settings: SampleSettings, most: int | None
) -> list[str]:
    """What makes samples of so many networks fit; ``most`` images at once do, None where not one does."""
    remedies = []
    if most is not None and most < settings.batch_size:
        remedies.append(f"pass `batch_size` {most}")
    if settings.offload == "none" and networks > 1:
        remedies.append("pass `offload` disk")
    if settings.quantize is None:
        remedies.append("pass `quantize` int8")
    if pipeline.experts.dtype == torch.float32:
        remedies.append("pass `dtype` bfloat16")
    return remedies


def measure_experts(found: Sampling, free: int) -> dict[str, Measured]:
    """Measure one network of each kind that may run."""
    kinds = dict[str, Measured]()
    for network in found.networks:
        kind = kind_of(field_at(found.how.model.experts, network))
        if kind not in kinds:
            kinds[kind] = measure_field(found.how, found.batches[0], network, found.largest, free)
    return kinds


def measure_router(model: Ensemble, shape: Sequence[int], most: int, free: int) -> Measured:
    """Measure the router of a model on up to ``most`` states of a ``shape``."""
    router = model.router
    assert router is not None

    def call(number: int) -> object:
        x = torch.zeros(number, *shape, device=model.device)
        t = torch.full((number,), 0.5, dtype=torch.float64)
        return answer_of(router, x, t, len(model.experts))

    return measure(call, model.device, most, free)


def measure_decoding(
    pipeline: HDDMPipeline, expert: int, shape: Sequence[int], most: int, free: int
) -> Measured:
    """Measure decoding and packing of up to ``most`` samples of an expert."""
    device = pipeline.experts.device

    def call(number: int) -> None:
        samples = torch.zeros(number, *shape, device=device)
        for image in to_bytes(pipeline.decode(samples, expert).cpu()):
            save_png(image, io.BytesIO())

    return measure(call, device, most, free)
