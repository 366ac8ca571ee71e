"""What an ensemble hands to a router and asks of it, whoever made it."""

import pytest
import torch
from torch import Tensor, nn

from hddm.ensemble import Ensemble
from hddm.routers import Router
from hddm.schedules import LinearSchedule
from hddm.utils.errors import HddmError
from hddm.velocity import VelocityField

SHAPE = (1, 2, 2)


def _ensemble(router: object) -> Ensemble:
    fields = [VelocityField(lambda x, t: x, LinearSchedule(), "flow_prediction") for _ in range(2)]
    return Ensemble(fields, router, "full")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_times_reach_a_router_in_the_states_dtype_float32_at_least(dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    def router(x_t: Tensor, t: Tensor) -> Tensor:
        seen.append(t.dtype)
        return torch.full((len(x_t), 2), 0.5)

    _ensemble(router).velocity(torch.zeros(3, *SHAPE, dtype=dtype), torch.full((3,), 0.3))
    assert seen == [torch.float64 if dtype == torch.float64 else torch.float32]


def test_our_router_keeps_float64_states_in_float64() -> None:
    head = nn.Linear(5, 2).double()

    def network(x_t: Tensor, t: Tensor) -> Tensor:
        logits: Tensor = head(torch.cat([x_t.flatten(1), t[:, None]], dim=1))
        return logits

    x_t, t = torch.randn(3, *SHAPE, dtype=torch.float64), torch.full((3,), 1 / 3, dtype=torch.float64)
    probabilities = Router(network, time_scale=10.0)(x_t, t)
    torch.testing.assert_close(probabilities, network(x_t, 10 * t).softmax(1), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "row", [[3.0, -2.0], [0.0, 0.0], [float("nan"), 1.0], [0.7, 0.7]], ids=["logits", "zeros", "nan", "sum"]
)
def test_what_is_no_probability_is_refused(row: list[float]) -> None:
    mixed = _ensemble(lambda x, t: torch.tensor(row).expand(len(x), 2))
    with pytest.raises(HddmError, match="not probabilities"):
        mixed.velocity(torch.zeros(3, *SHAPE), torch.full((3,), 0.3))
