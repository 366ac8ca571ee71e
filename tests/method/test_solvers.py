"""Solvers against exact solutions, and DDIM as the Euler method of the converted velocity."""

import math
from collections.abc import Callable
from typing import get_args

import diffusers
import pytest
import torch
from torch import Tensor

from hddm.settings import SolverName
from hddm.solvers import SOLVERS, Solver, euler
from tests.cases import BETAS, discrete_case, oracle_field
from tests.oracles import GaussianMixture, OracleNetwork, relative_error

SHARD = GaussianMixture.random(seed=0, modes=4, dim=8)
ORDERS = [("euler", 1), ("heun", 2), ("adams-moulton", 3)]


def test_settings_name_the_solvers_that_there_are() -> None:
    assert list(SOLVERS) == list(get_args(SolverName))


def _swing(x: Tensor, t: Tensor, then: Tensor) -> Tensor:
    """dx/dt whose solution is x(t) = x(0) exp(sin 3t)."""
    return 3 * torch.cos(3 * t) * x


def _exact(start: float, stop: float, x: Tensor) -> Tensor:
    return x * math.exp(math.sin(3 * stop) - math.sin(3 * start))


def _even(steps: int) -> Tensor:
    return torch.linspace(0, 1, steps + 1, dtype=torch.float64)


def _alternating(steps: int) -> Tensor:
    """Steps h, 3h, h, 3h, …: on a grid that is not smooth, wrong uneven weights cost an order."""
    widths = torch.tensor([1.0, 3.0], dtype=torch.float64).repeat(steps // 2)
    return torch.cat([torch.zeros(1).double(), widths.cumsum(0) / widths.sum()])


def _shifted(steps: int) -> Tensor:
    return 3 * _even(steps) / (1 + 2 * _even(steps))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "order"), ORDERS)
@pytest.mark.parametrize(
    ("grid", "downwards"),
    [(_even, False), (_alternating, True), (_shifted, True)],
    ids=["even, up", "alternating, down", "shifted, down"],
)
def test_error_falls_with_its_order(
    name: str, order: int, grid: Callable[[int], Tensor], downwards: bool
) -> None:
    x = torch.ones(1, dtype=torch.float64)
    errors = []
    # Adams-Moulton begins by order 3 and goes on by order 4; the first takes over late.
    for steps in (4096, 8192) if name == "adams-moulton" else (1024, 2048):
        times = grid(steps).flip(0) if downwards else grid(steps)
        found = SOLVERS[name](_swing, x, times)
        errors.append((found - _exact(times[0].item(), times[-1].item(), x)).abs().item())
    slopes = torch.tensor(errors).log2().diff()
    assert slopes[-1].item() == pytest.approx(-order, abs=0.1)


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_a_straight_path_is_exact_in_one_step(solver: Solver) -> None:
    x, slope = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).double()
    times = torch.tensor([1.0, 0.7, 0.0], dtype=torch.float64)
    for grid in (times, times[[0, 2]]):
        torch.testing.assert_close(solver(lambda x, t, then: slope, x, grid), x - slope)


@pytest.mark.parametrize(("name", "calls"), [("euler", 7), ("heun", 14), ("adams-moulton", 7)])
def test_calls_a_step(name: str, calls: int) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    SOLVERS[name](lambda x, t, then: seen.append((t, then)) or x, torch.ones(2), _even(7).flip(0))
    assert len(seen) == calls
    assert all(t.shape == () and t.dtype == torch.float64 for pair in seen for t in pair)
    # Every call is for a step down to the next time; Heun's second one is at its end.
    assert sorted({float(then) for _, then in seen}) == _even(7)[:7].tolist()
    assert all(t > then or (name == "heun" and t == then) for t, then in seen)


@pytest.mark.parametrize("name", ["ddpm-linear", "sd-scaled-linear", "squaredcos-cap-v2"])
@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("set_alpha_to_one", [True, False])
def test_diffusers_ddim_is_euler_on_the_matched_grid(
    name: str, prediction_type: str, set_alpha_to_one: bool
) -> None:
    case = discrete_case(name, rescaled=False)
    scheduler = diffusers.DDIMScheduler(
        **BETAS[name],
        prediction_type=prediction_type,
        clip_sample=False,
        set_alpha_to_one=set_alpha_to_one,
    )
    # diffusers multiplies up its table in float32; the same betas, multiplied in float64.
    scheduler.alphas_cumprod = (1 - scheduler.betas.double()).cumprod(0)
    last = torch.ones(()).double() if set_alpha_to_one else scheduler.alphas_cumprod[0]
    scheduler.final_alpha_cumprod = last
    scheduler.set_timesteps(50)
    network = OracleNetwork(SHARD, case.alpha_sigma, prediction_type)
    noise = torch.randn(16, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y = noise
    for step in scheduler.timesteps:
        output = network(y, step.expand(len(y)))
        y = scheduler.step(output, step, y, eta=0.0).prev_sample
    field = oracle_field(SHARD, case, prediction_type)
    a, s = case.alpha_sigma(scheduler.timesteps.double())
    last = torch.zeros(1 if set_alpha_to_one else 0)
    times = torch.cat([s / (a + s), last])
    x = euler(lambda x, t, then: field.velocity(x, t.expand(len(x))), noise / (a[0] + s[0]), times)
    assert relative_error(x if set_alpha_to_one else x * (a[-1] + s[-1]), y) < 1e-9


def test_a_bend_that_goes_on_is_followed_exactly() -> None:
    """Velocities of the second degree in t leave no error after the steps that the bend is learned from."""
    x, errors = torch.zeros(1, dtype=torch.float64), []
    times = _alternating(12).flip(0)

    def keep(index: int, state: Tensor) -> Tensor:
        errors.append(float(state - (times[index + 1] ** 3 - 1)))
        return state

    SOLVERS["adams-moulton"](lambda x, t, then: (3 * t**2).expand(1), x, times, keep)
    # The state after the step into the fourth velocity is the first that this velocity has corrected.
    assert abs(errors[0]) > 1e-2
    assert errors[4:] == pytest.approx([errors[4]] * len(errors[4:]), abs=1e-12)


def test_each_sample_has_its_own_bend() -> None:
    """A sample whose velocity jumps to and fro changes nothing for its neighbours."""
    kinds = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def velocity(x: Tensor, t: Tensor, then: Tensor) -> Tensor:
        rough = torch.sign(torch.sin(40 * t))
        return torch.where(x[:, 1:] > 0.5, rough, torch.cos(3 * t)) * torch.tensor([1.0, 0.0])

    x = torch.stack([torch.zeros(2).double(), kinds], 1)
    solve = SOLVERS["adams-moulton"]
    both = solve(velocity, x, _even(15).flip(0))
    alone = [solve(velocity, x[k : k + 1], _even(15).flip(0)) for k in range(2)]
    torch.testing.assert_close(both, torch.cat(alone), rtol=0, atol=1e-14)
