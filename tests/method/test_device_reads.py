"""No step waits for the device, except for the router's answer: reads and copies are counted.

Networks and states are on torch's meta device, which computes no numbers: whoever looks at one would fail.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hddm.calibration import Calibration, Moments
from hddm.condition_names import LABELS
from hddm.conditions import Conditions
from hddm.ensemble import Ensemble
from hddm.guidance import Guidance
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.routers import Router
from hddm.running import run
from hddm.sampling import batches, plan
from hddm.schedules import LinearSchedule, Schedule
from hddm.velocity import VelocityField
from tests.cases import case_named, in_parts
from tests.ensemble_files import FLOW

SHAPE, CLASSES, NUM, STEPS = (3, 4, 4), ("a", "b", "c"), 6, 8


class Watched(TorchDispatchMode):
    """Counts reads of tensors on the meta device, whose values it makes up, and copies to it that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.waits = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        source = args[0] if args and isinstance(args[0], Tensor) else None
        on_device = source is not None and source.device.type == "meta"
        name = function.overloadpacket.__name__
        if name == "_local_scalar_dense" and on_device:
            self.reads += 1
            return True
        if name == "_to_copy" and source is not None:
            target = torch.device(kwargs.get("device") or source.device).type
            if on_device and target == "cpu":
                self.reads += 1
                made = torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
                return (
                    made / made.shape[-1] if made.is_floating_point() and made.ndim == 2 else made
                )
            if not on_device and target == "meta" and not kwargs.get("non_blocking"):
                self.waits += 1
        return function(*args, **kwargs)


def _field(
    k: int, schedule: Schedule, kind: str, part: tuple[float, float] = (0, 1)
) -> VelocityField:
    torch.manual_seed(k)
    network = ExpertTransformer(**FLOW | {"num_classes": 3}).to("meta")
    images = torch.randn(32, *SHAPE)
    times, weights = torch.tensor([0.0, 1.0]), torch.full((2, 1), 0.5)
    moments = Moments(
        images.flatten(1).mean(0), torch.zeros(48, 0), torch.ones(1), torch.zeros(3, 48)
    )
    return VelocityField(
        network,
        schedule,
        kind,
        1000,
        Calibration(moments, times, weights),
        (LABELS,),
        {LABELS: torch.tensor(3)},
        SHAPE,
        CLASSES if k else CLASSES[::-1],
        weak=VelocityField(
            network, schedule, kind, 1000, None, (LABELS,), {LABELS: torch.tensor(3)}, SHAPE
        ),
        noise_range=part,
    )


def _ensemble(pair: bool) -> Ensemble:
    parts = [(0.5, 1), (0, 0.5), (0, 1)] if pair else [(0, 1)] * 3
    betas = case_named("ddpm-linear").schedule
    kinds: list[tuple[Schedule, str]] = [(betas, "epsilon"), (LinearSchedule(), "flow_prediction")]
    fields = [_field(k, *kinds[k % 2], part) for k, part in enumerate(parts)]
    network = RouterTransformer(3, 4, 3, patch_size=2, hidden_size=16, depth=1, num_heads=2).to(
        "meta"
    )
    return Ensemble(in_parts(fields, [0, 0, 1] if pair else [0, 1, 2]), Router(network), "draw")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("strategy", "pair", "guidance"),
    [
        ("draw", True, 2.0),
        ("commit-0.5", True, 1.0),
        ("nucleus-0.5", False, Guidance(2.0, by="weak")),
    ],
)
def test_a_step_reads_the_routers_answer_alone(
    strategy: str, pair: bool, guidance: float | Guidance
) -> None:
    how = plan(_ensemble(pair), steps=STEPS, guidance=guidance, strategy=strategy)
    asked = Conditions({LABELS: torch.arange(NUM) % 3})
    (batch,) = batches(how, range(NUM), asked, NUM)
    seen: list[tuple[int, int]] = []
    with Watched() as watched:

        def on_step(index: int, x: Tensor) -> Tensor:
            seen.append((watched.reads, watched.waits))
            return x

        run(how, batch, on_step)
    # The first steps also send what later ones use again.
    late = torch.tensor(seen).diff(dim=0)[-2:]
    assert late.tolist() == [[1 if strategy == "nucleus-0.5" else 0, 0]] * 2
    # Whether the samples are finite.
    assert watched.reads == seen[-1][0] + 1
