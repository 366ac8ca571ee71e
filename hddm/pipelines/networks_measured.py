"""What one network of a pipeline takes for its samples, measured on few of them."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hddm.call_counts import Network
from hddm.guidance import Guidance
from hddm.networks.offload import StoredNetwork, holder_of
from hddm.running import Batch, Plan
from hddm.utils.errors import HddmError
from hddm.utils.machine import LiveBytes
from hddm.utils.scaling import LARGE, Growth, measure_times
from hddm.utils.tensors import synchronize
from hddm.velocity import VelocityField


@dataclass(frozen=True)
class Measured:
    """Bytes beside weights, and seconds, by the number of samples of a call."""

    memory: Growth
    seconds: Growth
    opening: float = 0.0
    """Seconds in which the weights were read."""

    def each(self, largest: int) -> float:
        """Seconds of one sample in calls of ``largest``."""
        return self.seconds.at(largest) / largest


@torch.no_grad()
def measure(call: Callable[[int], object], device: torch.device, most: int, free: int) -> Measured:
    """Measure ``call(n)``, which runs n samples, up to ``most`` of them in ``free`` bytes.

    The first call is not counted, since it makes what stays.
    """

    def traced(number: int) -> int:
        with LiveBytes() as live:
            call(number)
        return live.peak()

    def timed(number: int) -> float:
        started = _now(device)
        call(number)
        return _now(device) - started

    memory = Growth()
    is_large = timed(1) > LARGE
    memory.known[1] = traced(1)
    if most > 1 and not is_large and 2 * memory.known[1] <= free:
        memory.known[2] = traced(2)
    seconds = measure_times(most, timed, lambda number: memory.at(number) <= free, is_large)
    return Measured(memory, seconds)


def _now(device: torch.device) -> float:
    synchronize(device)
    return time.perf_counter()


def field_at(fields: Sequence[VelocityField], network: Network) -> VelocityField:
    """The field of a network: an expert's, or that of its weak model."""
    field = fields[network.expert]
    if not network.is_weak:
        return field
    if field.weak is None:
        raise HddmError(f"expert {network.expert} has no weak model")
    return field.weak


def kind_of(field: VelocityField) -> str:
    """Equal for fields whose calls cost the same: those with networks of one config."""
    config = getattr(field.network, "config", {})
    values: Mapping[str, object] = dict(config)
    shown = json.dumps(values, sort_keys=True, default=str)
    is_calibrated = field.calibration is not None
    return f"{shown} {field.sample_shape} {field.dtype} {is_calibrated}"


def holders_of(fields: Sequence[VelocityField]) -> list[StoredNetwork]:
    """What holds the weights of these fields, each once."""
    found = dict[StoredNetwork, None]()
    for field in fields:
        holder = holder_of(field.network)
        if holder is not None:
            found[holder] = None
    return list(found)


def measure_field(how: Plan, batch: Batch, network: Network, most: int, free: int) -> Measured:
    """Measure an expert of a plan on the conditions of a batch, as it runs in `VelocityField.guided`."""
    model = how.model
    field = field_at(model.experts, network)
    device = field.device
    started = _now(device)
    if isinstance(field.network, nn.Module):
        # Brings the weights to the device.
        next(iter(field.network.parameters()), None)
    opening = _now(device) - started
    low, high = field.noise_range
    end = torch.tensor(low, dtype=torch.float64)

    def call(number: int) -> Tensor:
        rows = torch.arange(number) % len(batch.rows)
        given = batch.conditions.rows(rows, device).given
        _, _, own = model.conditions_by_expert(Guidance(1.0), {}, given)[network.expert]
        x = torch.zeros(number, *how.shape_of(network.expert), device=device)
        times = torch.full((number,), (low + high) / 2, dtype=torch.float64)
        inputs = model.experts[network.expert].inputs(x, Guidance(1.0), {}, own)
        return field.guided(x, times, inputs, end)

    found = measure(call, device, most, free)
    return Measured(found.memory, found.seconds, opening)
