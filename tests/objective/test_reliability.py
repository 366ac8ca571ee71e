"""Weights by noise level: the optimum in closed form, what they do to a mixture, and where they are kept."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hddm
from hddm.ensemble import Ensemble
from hddm.experts.assembly import assemble, change
from hddm.objective.reliability import TIMES, best_weights, measured_weights, weigh_experts
from hddm.objective.scores import score_held_out
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.reliability import ReliabilityRouter
from hddm.utils.errors import HddmError
from tests.artefacts import Command, refusal
from tests.ensemble_files import flow_expert, saved


def _grams(covariance: Tensor, num: int = 1) -> Tensor:
    return covariance.expand(num, -1, -1)


def test_weights_are_the_optimum_for_known_covariances() -> None:
    covariance = torch.tensor([[1.0, 0.3, 0.1], [0.3, 2.0, 0.2], [0.1, 0.2, 0.5]]).double()
    inverse = torch.linalg.solve(covariance, torch.ones(3).double())
    expected = inverse / inverse.sum()
    assert (expected > 0).all()
    torch.testing.assert_close(best_weights(_grams(covariance)), expected, rtol=0, atol=1e-6)


def test_an_expert_whose_errors_another_has_too_gets_no_weight() -> None:
    # Without the bound its weight would be negative.
    covariance = torch.tensor([[1.0, 1.2], [1.2, 2.0]]).double()
    found = best_weights(_grams(covariance))
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0]).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_weights_are_better(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    covariance = factor @ factor.T
    found = best_weights(_grams(covariance))
    least = found @ covariance @ found
    assert found.sum().item() == pytest.approx(1)
    others = torch.rand(5000, 4, generator=generator, dtype=torch.float64) ** 3
    others = others / others.sum(1, keepdim=True)
    assert least <= torch.einsum("nk,kl,nl->n", others, covariance, others).min() + 1e-6


def test_on_top_of_a_router_the_error_is_no_larger_than_without() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(200, 3, generator=generator, dtype=torch.float64).softmax(1)
    errors = torch.randn(200, 3, 8, generator=generator, dtype=torch.float64)
    errors = errors * torch.tensor([1.0, 3.0, 0.5])[:, None]
    grams = errors @ errors.mT / 8
    weights = best_weights(grams, shares)

    def error(mixed: Tensor) -> float:
        mixed = mixed / mixed.sum(1, keepdim=True)
        return torch.einsum("nk,nkl,nl->n", mixed, grams, mixed).mean().item()

    assert error(shares * weights) < 0.8 * error(shares)
    assert weights[2] > weights[0] > weights[1]


def test_a_router_is_linear_between_its_times_and_multiplies_another() -> None:
    x = torch.zeros(4, 1, 2, 2)
    t = torch.tensor([0.0, 0.2, 0.3, 1.0]).double()
    router = ReliabilityRouter([0.2, 0.4], [[1.0, 0.0], [1.0, 3.0]])
    expected = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.625, 0.375], [0.25, 0.75]])
    torch.testing.assert_close(router(x, t), expected)
    base = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.2, 0.8], [0.9, 0.1]])
    both = ReliabilityRouter([0.2, 0.4], [[1.0, 0.0], [1.0, 3.0]], lambda x, t: base)(x, t)
    product = base * expected
    # Where the router leaves an expert that has no weight, the router decides.
    product[1] = base[1]
    torch.testing.assert_close(both, product / product.sum(1, keepdim=True))


@pytest.mark.parametrize(
    ("times", "weights"),
    [([0.4, 0.2], [[1], [1]]), ([0.5], [[1], [1]]), ([0.5], [[-1.0, 2.0]]), ([0.5], [[0.0, 0.0]])],
)
def test_other_weights_are_refused(times: list[float], weights: list[list[float]]) -> None:
    with pytest.raises(HddmError, match="router by reliability"):
        ReliabilityRouter(times, weights)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("experts")
    return [saved(root / str(k), flow_expert(k)) for k in range(2)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    folder = tmp_path_factory.mktemp("held_out")
    generator = torch.Generator().manual_seed(1)
    for k in range(24):
        pixels = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{k}.png")
    return folder


def test_the_default_strategy_follows_from_the_router_and_the_folder_says_why(
    pair: list[Path], tmp_path: Path
) -> None:
    def record(name: str) -> dict[str, object]:
        content: dict[str, object] = json.loads((tmp_path / name / "ensemble.json").read_text())
        return content

    assemble(pair, tmp_path / "mixed", "reliability")
    assemble(pair, tmp_path / "drawn")
    assemble(pair, tmp_path / "chosen", "reliability", strategy="draw")
    for name, strategy in (("mixed", "full"), ("drawn", "draw")):
        assert record(name)["strategy"] == strategy
        assert str(record(name)["strategy_reason"]).startswith("the default")
    assert record("chosen")["strategy"] == "draw"
    assert "strategy_reason" not in record("chosen")
    # It stays with the strategy, until someone chooses another.
    change(tmp_path / "mixed", add=[saved(tmp_path / "third", flow_expert(2))])
    assert str(record("mixed")["strategy_reason"]).startswith("the default")
    change(tmp_path / "mixed", strategy="top-1")
    assert "strategy_reason" not in record("mixed")


def test_a_weighed_ensemble_has_at_each_level_at_most_the_error_of_its_best_expert(
    pair: list[Path], images: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "mix"
    assemble(pair, whole, "reliability", strategy="full")
    weigh_experts(whole, images, seed=3)
    model = hddm.load(whole)
    assert isinstance(model, Ensemble)
    assert isinstance(model.router, ReliabilityRouter)
    weights = torch.tensor(
        json.loads((whole / "ensemble.json").read_text())["reliability"]["weights"]
    )
    assert weights.shape == (len(TIMES), 2)
    torch.testing.assert_close(weights.sum(1), torch.ones(len(TIMES)))
    options = {"held_out": images, "likelihood_images": 0, "noise_draws": 8}
    mixed = score_held_out(whole, strategies=("full",), **options)
    alone = [score_held_out(one, **options) for one in pair]
    for place, level in enumerate(mixed.strategies[0].levels):
        own = sum(level.by_image) / len(level.by_image)
        best = min(
            sum(one.strategies[0].levels[place].by_image) / len(level.by_image) for one in alone
        )
        # Weights were fitted on other noise.
        assert own <= 1.02 * best


@pytest.mark.integration
def test_weights_stay_with_the_folder_until_its_experts_change(
    pair: list[Path], images: Path, tmp_path: Path, hddm: Command
) -> None:
    whole = tmp_path / "mix"
    code, _, _ = hddm("assemble", *pair, "--router", "reliability", "--out", whole)
    assert code == 0
    code, output, _ = hddm("calibrate", whole, "--data", images)
    assert (code, output.count("t = ")) == (0, len(TIMES))
    HDDMPipeline.from_pretrained(whole).save_pretrained(tmp_path / "copy")
    for folder in (whole, tmp_path / "copy"):
        assert "reliability" in json.loads((folder / "ensemble.json").read_text())
    notes = change(whole, strategy="full")
    assert "reliability" in json.loads((whole / "ensemble.json").read_text())
    assert not any("weights by noise level" in note for note in notes)
    notes = change(whole, remove=["0"])
    assert any("weights by noise level" in note for note in notes)
    assert "reliability" not in json.loads((whole / "ensemble.json").read_text())
    code, _, error = hddm("calibrate", whole)
    assert (code, error.count("\n")) == (2, 1)
    assert "--data: is required for an ensemble" in error


def test_weights_follow_experts_that_are_taken_in_another_order(
    pair: list[Path], images: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "mix"
    assemble(pair, whole, "reliability", strategy="full")
    weigh_experts(whole, images)
    x, t = torch.randn(2, 3, 4, 4), torch.tensor([0.1, 0.7]).double()
    plain, turned = (hddm.load(whole, experts=order) for order in ([0, 1], [1, 0]))
    torch.testing.assert_close(turned.router(x, t), plain.router(x, t).flip(1))  # type: ignore[union-attr]
    torch.testing.assert_close(turned.velocity(x, t), plain.velocity(x, t))
    alone = hddm.load(whole, experts=[1])
    assert alone.router(x, t).shape == (2, 1)  # type: ignore[union-attr]


def test_on_top_of_a_router_that_runs_once() -> None:
    calls = []

    def base(x: Tensor, t: Tensor) -> Tensor:
        calls.append(len(x))
        return torch.full((len(x), 2), 0.5)

    router = ReliabilityRouter([0.5], [[1.0, 3.0]], base)
    router(torch.zeros(3, 1, 2, 2), torch.full((3,), 0.2).double())
    assert calls == [3]


def test_rows_that_the_router_alone_decides_have_a_gradient() -> None:
    x = torch.tensor([[0.3, -0.2]], requires_grad=True)

    def base(x: Tensor, t: Tensor) -> Tensor:
        # All probability is with the expert that has no weight.
        return torch.stack([x.sum(1) * 0, 1 + x.sum(1) * 0], 1)

    router = ReliabilityRouter([0.5], [[1.0, 0.0]], base)
    found = router(x, torch.tensor([0.5]).double())
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert found.tolist() == [[0.0, 1.0]]
    assert gradient.isfinite().all()


def test_experts_that_share_the_noise_are_not_weighed(pair: list[Path]) -> None:
    fields = [hddm.load(folder) for folder in pair]
    from tests.cases import in_parts

    for field, part in zip(fields, [(0.0, 0.5), (0.5, 1.0)], strict=True):
        field.noise_range = part  # type: ignore[union-attr]
    model = Ensemble(in_parts(fields, [0, 0]))  # type: ignore[arg-type]
    message = refusal(measured_weights, model, torch.zeros(4, 3, 4, 4), {}, 0)
    assert "parts of the noise" in message
