"""The loop: its learning rate, its float32 average of the weights, which optimizer trains what."""

import itertools
import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hddm.experts.records import WEAK_FILE
from hddm.networks.sizes import size_config
from hddm.networks.transformers import ExpertTransformer, RouterTransformer
from hddm.training.device import optimizer_of
from hddm.training.expert import train_expert
from hddm.training.loader import Loader, Order, StepInputs
from hddm.training.loop import StepReport, Task, fit
from hddm.training.settings import ExpertRecipe, ExpertSettings, RunOptions, resolve
from hddm.training.state import Ema
from hddm.utils.errors import HddmError
from hddm.utils.records import WEIGHTS
from hddm.utils.streams import Use
from tests.artefacts import Died, ending_at, expert_settings, recipe


class _Point(nn.Module):
    """One parameter vector."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor([3.0, -2.0]))


def _task(point: _Point, loss: Callable[[], Tensor]) -> Task:
    """One loss for every sample."""

    def draw(rows: Tensor, noise: torch.Generator, own: slice) -> StepInputs:
        return {"rows": rows}

    return Task(point, 1000, draw, lambda network, inputs: loss().expand(len(inputs["rows"])))


def _average(values: list[Tensor], decay: float) -> Tensor:
    """The average of ``values[1:]`` from ``values[0]`` on, by its definition."""
    average = values[0].double()
    for n, value in enumerate(values[1:]):
        d = min(decay, (1 + n) / (10 + n))
        average = d * average + (1 - d) * value.double()
    return average


def test_the_average_moves_in_float32_where_bfloat16_would_stand_still() -> None:
    point = _Point().bfloat16()
    ema = Ema(point, decay=0.999)
    start = point.place.detach().clone()
    ema.updates = 100_000
    point.place.data = start + torch.tensor([0.5, 0.5]).bfloat16()
    for _ in range(3):
        ema.update()
    (shadow,) = ema.tensors().values()
    assert shadow.dtype == torch.float32
    torch.testing.assert_close(
        shadow - start.float(), torch.full((2,), 0.5 * (1 - 0.999**3)), rtol=1e-3, atol=0
    )
    assert torch.equal(shadow.bfloat16(), start)


@pytest.mark.parametrize("decay", [0.0, 0.6])
def test_training_leaves_the_averaged_weights(decay: float) -> None:
    point = _Point()
    values = [point.place.detach().clone()]
    settings = recipe(steps=30, learning_rate=0.1, warmup=3, ema_decay=decay)
    task = _task(point, lambda: point.place.square().sum())
    fitted = fit(
        task, settings, watchers=[lambda report: values.append(point.place.detach().clone())]
    )
    torch.testing.assert_close(point.place.double(), _average(values, decay), rtol=1e-5, atol=1e-6)
    assert torch.equal(point.place, values[-1]) == (decay == 0)
    expected = [value.square().sum().item() for value in values[:-1]]
    assert fitted.state.losses == pytest.approx(expected, rel=1e-6)
    assert fitted.state.losses[-1] < fitted.state.losses[0]


@pytest.mark.parametrize(
    ("steps", "warmup", "warm"), [(12, 4, 4), (5, 0, 1), (6, 20, 20), (9, None, 1), (60, None, 6)]
)
def test_the_rate_warms_up_linearly_and_decays_as_a_cosine(
    steps: int, warmup: int | None, warm: int
) -> None:
    """Adam moves by exactly its rate where the gradient never changes."""
    point = _Point()
    places = [point.place.detach().clone()]
    settings = recipe(
        steps=steps, learning_rate=0.01, warmup=warmup, weight_decay=0, max_grad_norm=100
    )
    task = _task(point, lambda: point.place.sum())
    fit(task, settings, watchers=[lambda report: places.append(point.place.detach().clone())])
    moved = -torch.stack(places).diff(dim=0)[:, 0]
    rates = [
        0.01 * min(1, (n + 1) / warm) * (1 + math.cos(math.pi * n / steps)) / 2
        for n in range(steps)
    ]
    torch.testing.assert_close(moved, torch.tensor(rates), rtol=1e-3, atol=1e-6)
    assert [recipe(steps=steps).warmup for steps in (999, 1000, 1300)] == [99, 100, 100]


def test_the_gradient_is_clipped() -> None:
    seen: list[float] = []
    point = _Point()

    def watch(report: StepReport) -> None:
        assert point.place.grad is not None
        seen.append(point.place.grad.norm().item())
        assert report.grad_norm > 1000

    task = _task(point, lambda: 1000 * point.place.square().sum())
    fit(task, recipe(steps=2, max_grad_norm=0.25), watchers=[watch])
    assert seen == pytest.approx([0.25, 0.25], rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_left_out_and_named_with_its_samples(
    bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve samples make one epoch of four steps, of which one sees the broken sample."""
    point = _Point()

    def loss(network: nn.Module, inputs: StepInputs) -> Tensor:
        return point.place.sum() * torch.where(inputs["rows"] == 5, bad, 1.0)

    task = Task(point, 12, lambda rows, noise, own: {"rows": rows}, loss)
    settings = recipe(steps=8, batch_size=3, learning_rate=0.1, warmup=0)
    order = Order(12, 3, settings.seed, task.key)
    broken = [step for step in range(1, 9) if 5 in order.rows(step)]
    assert len(broken) == 2
    fit(task, settings)
    for step in broken:
        assert re.search(rf"step {step}: loss .*samples \[5.*\]; the step is skipped", caplog.text)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_skipped_step_changes_no_weight_moment_or_average(optimizer: str) -> None:
    """Nor does a skipped first step, which finds no moments yet."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    bad = {1, 4}
    steps = iter(range(1, 100))

    def loss(network: nn.Module, inputs: StepInputs) -> Tensor:
        factor = math.nan if next(steps) in bad else 1.0
        each: Tensor = network(torch.ones(len(inputs["rows"]), 2)).square().sum(1)
        return each * factor

    task = Task(network, 100, lambda rows, noise, own: {"rows": rows}, loss)
    rates = {"learning_rate": 0.1, **({"muon_learning_rate": 0.1} if optimizer == "muon" else {})}
    settings = recipe(steps=6, optimizer=optimizer, warmup=0, **rates)
    seen: list[dict[str, Tensor]] = [
        {name: p.detach().clone() for name, p in network.named_parameters()}
    ]

    def watch(report: StepReport) -> None:
        files = report.state.tensors()
        averages = {f"ema {name}": value.clone() for name, value in files["ema"].items()}
        moments = {name: value.clone() for name, value in files["optimizer"].items()}
        seen.append(
            {name: value.clone() for name, value in files["weights"].items()} | averages | moments
        )

    fit(task, settings, watchers=[watch])
    assert any(name.startswith("momentum_buffer") for name in seen[-1]) == (optimizer == "muon")
    for step, (before, after) in enumerate(itertools.pairwise(seen), 1):
        unchanged = [torch.equal(before[name], after[name]) for name in before]
        assert all(unchanged) if step in bad else not any(unchanged), step


def test_the_figures_of_a_step_are_read_once_the_next_one_computes() -> None:
    """So a GPU need not wait for Python; after an error in a step, the one before it is complete."""
    point, calls = _Point(), itertools.count(1)
    events: list[str] = []

    def loss() -> Tensor:
        events.append(f"loss {(step := next(calls))}")
        if step == 4:
            raise HddmError("step 4")
        return point.place.sum()

    with pytest.raises(HddmError, match="step 4"):
        fit(
            _task(point, loss),
            recipe(steps=6),
            watchers=[lambda one: events.append(f"report {one.step}")],
        )
    assert events == ["loss 1", "loss 2", "report 1", "loss 3", "report 2", "loss 4", "report 3"]


def test_a_last_step_that_was_not_finite_is_left_out_like_any_other() -> None:
    """A resumed run would see the same step again, so that it could never end; a run of one alone is none."""
    point, calls = _Point(), iter(range(1, 100))
    task = _task(point, lambda: point.place.sum() * (math.nan if next(calls) == 3 else 1))
    fitted = fit(task, recipe(steps=3))
    assert [math.isfinite(loss) for loss in fitted.state.losses] == [True, True, False]
    assert math.isfinite(fitted.record(recipe(steps=3))["final_loss"])
    assert point.place.isfinite().all()
    with pytest.raises(HddmError, match=r"^step 3: loss nan.*nothing was written; try a lower"):
        fit(_task(point, lambda: point.place.sum() * math.nan), recipe(steps=3))
    task = _task(point, lambda: (point.place - point.place.detach()).abs().sum().sqrt())
    with pytest.raises(HddmError, match=r"step 1: loss 0.0, gradient norm (nan|inf)"):
        fit(task, recipe(steps=5, max_non_finite=1))


def test_the_weak_model_is_the_average_of_its_step() -> None:
    point, values = _Point(), []
    values.append(point.place.detach().clone())
    task = replace(_task(point, lambda: point.place.square().sum()), weak_step=7)
    settings = recipe(steps=30, learning_rate=0.1, ema_decay=0.9)
    fitted = fit(
        task, settings, watchers=[lambda report: values.append(point.place.detach().clone())]
    )
    torch.testing.assert_close(fitted.state.weak["place"], _average(values[:8], 0.9).bfloat16())
    assert fit(_task(point, lambda: point.place.sum()), settings).state.weak == {}


@pytest.mark.parametrize(
    ("weak_at", "steps", "expected"),
    [(0.25, 100, 25), (0.25, 1, 0), (0.25, 2, 0), (0.96, 10, 9), (0, 9, 0)],
)
def test_the_weak_model_is_of_a_step_before_the_last(
    weak_at: float, steps: int, expected: int
) -> None:
    settings = ExpertSettings(objective="flow", steps=steps, weak_at=weak_at)
    assert resolve(ExpertRecipe, settings).weak_step == expected


@pytest.mark.parametrize("ahead", [0, 2])
def test_inputs_are_those_of_their_step_drawn_ahead_or_not_and_end_with_the_last(
    ahead: int,
) -> None:
    asked: list[int] = []

    def draw(rows: Tensor, noise: torch.Generator, own: slice) -> StepInputs:
        asked.append(threading.get_ident())
        return {"rows": rows, "eps": torch.randn(4, generator=noise)}

    order, again = (Order(10, 4, 3, (Use.STUDENT_ORDER, Use.STUDENT_STEPS, 1)) for _ in range(2))
    loader = Loader(order, draw, last=7, own=slice(4), ahead=ahead)
    for step in range(1, 8):
        (rows, inputs, seed), draws = loader.take(step), again.draws(step)
        assert torch.equal(rows, again.rows(step))
        assert torch.equal(inputs["eps"], torch.randn(4, generator=draws))
        assert seed == int(torch.randint(2**62, (), generator=draws))
    loader.close()
    assert len(asked) == 7
    assert (threading.get_ident() in asked) == (not ahead)


MUON = expert_settings("flow", optimizer="muon", learning_rate=1e-3, muon_learning_rate=0.02)
TINY = {"sample_size": 8, "in_channels": 3, **size_config("tiny")}


def _of_muon(network: nn.Module) -> set[str]:
    names = {parameter: name for name, parameter in network.named_parameters()}
    groups = optimizer_of(network, resolve(ExpertRecipe, MUON)).param_groups
    return {names[p] for group in groups if group["initial_lr"] == 0.02 for p in group["params"]}


def test_muon_takes_the_matrices_between_features_and_no_others() -> None:
    expert = ExpertTransformer(**TINY, num_classes=3, text_dim=16)
    found = _of_muon(expert)
    block = {"attn.in_proj_weight", "attn.out_proj.weight", "mlp.0.weight", "mlp.2.weight"}
    block |= {f"cross_{name}" for name in block if name.startswith("attn")}
    others = {
        "t_block.1.weight",
        "time_embed.mlp.0.weight",
        "time_embed.mlp.2.weight",
        "text_proj.weight",
    }
    assert found == others | {f"layers.{k}.{name}" for k in range(2) for name in block}
    router = _of_muon(RouterTransformer(num_experts=3, **TINY))
    assert "layers.0.adaLN_modulation.1.weight" in router
    assert not {name for name in router if name.startswith(("head", "patch_embed", "pos_embed"))}


def test_muon_makes_the_step_of_a_matrix_orthogonal() -> None:
    """All singular values of its first step are near the rate, times √(rows/columns) where rows are more."""
    layer = nn.Linear(16, 64, bias=False)
    settings = MUON.model_copy(update={"weight_decay": 0.0})
    optimizer = optimizer_of(nn.ModuleDict({"layer": layer}), resolve(ExpertRecipe, settings))
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    values = torch.linalg.svdvals(layer.weight.detach() - before) / 0.02
    assert ((values > 0.5 * 2) & (values < 1.3 * 2)).all()


@pytest.mark.integration
def test_a_training_by_muon_resumes_to_the_last_bit(whole: Path, tmp_path: Path) -> None:
    losses = train_expert(whole, tmp_path / "one", MUON)
    run = RunOptions(checkpoint_every=3, resume=True)
    with pytest.raises(Died):
        train_expert(whole, tmp_path / "two", MUON, on_step=ending_at(7), run=run)
    assert train_expert(whole, tmp_path / "two", MUON, run=run) == losses
    for file in (WEIGHTS, WEAK_FILE):
        one, two = (load_file(tmp_path / name / file) for name in ("one", "two"))
        assert all(torch.equal(one[name], two[name]) for name in one)
