"""What one evaluation costs, counted rather than estimated."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hddm.ensemble import Ensemble, Router
from hddm.velocity import VelocityField

# Late enough for a calibration to take part.
_TIME = 0.75


@contextlib.contextmanager
def counting() -> Iterator[FlopCounterMode]:
    """Counts floating-point operations within the block; a multiplication and an addition are two."""
    # The fused attention kernels for the CPU have no entry in torch's counter.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


@torch.no_grad()
def forward_mflop(model: VelocityField | Ensemble) -> tuple[float, float]:
    """Millions of floating-point operations of one expert and of the router, an image and evaluation.

    A multiplication and an addition count as two. The router's share is 0 where there is none.
    """
    fields = model.experts if isinstance(model, Ensemble) else [model]
    router = model.router if isinstance(model, Ensemble) else None
    x, t = _state(fields[0])
    with counting() as expert_counter:
        fields[0].raw_velocity(x, t.double(), {})
    return expert_counter.get_total_flops() / 1e6, router_flop(router, x) / 1e6


@torch.no_grad()
def evaluation_flop(field: VelocityField, **conditions: Tensor) -> int:
    """Operations of one velocity of one image, the expert's calibration included, without guidance."""
    x, t = _state(field)
    with counting() as counter:
        field.velocity(x, t.double(), 1.0, None, **conditions)
    return int(counter.get_total_flops())


@torch.no_grad()
def router_flop(router: object, x: Tensor) -> int:
    """Operations of one answer of a router for a state like ``x``; 0 for what is no `Router`."""
    with counting() as counter:
        if isinstance(router, Router):
            router(x[:1], torch.full((1,), _TIME, device=x.device))
    return int(counter.get_total_flops())


def _state(field: VelocityField) -> tuple[Tensor, Tensor]:
    shape = field.sample_shape
    assert shape is not None
    return torch.zeros(1, *shape, device=field.device), torch.full((1,), _TIME, device=field.device)
