"""What one evaluation costs, counted rather than estimated."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hddm.ensemble import Ensemble
from hddm.routing import Router
from hddm.velocity import VelocityField


@torch.no_grad()
def forward_mflop(model: VelocityField | Ensemble) -> tuple[float, float]:
    """Millions of floating-point operations of one expert and of the router, an image and evaluation.

    A multiplication and an addition count as two. The router's share is 0 where there is none.
    """
    fields = model.experts if isinstance(model, Ensemble) else [model]
    router = model.router if isinstance(model, Ensemble) else None
    shape = model.sample_shape
    assert shape is not None
    x, t = torch.zeros(1, *shape), torch.full((1,), 0.5)
    # The fused attention kernels for the CPU have no entry in torch's counter.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as expert_counter:
            fields[0].raw_velocity(x, t.double(), {})
        with FlopCounterMode(display=False) as router_counter:
            if isinstance(router, Router):
                router(x, t)
    return expert_counter.get_total_flops() / 1e6, router_counter.get_total_flops() / 1e6
