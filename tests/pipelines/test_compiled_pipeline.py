"""torch.compile on experts that come and go: the same images, and no compiling anew for weights read anew."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hddm.guidance import Guidance
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.serving.workers import VelocityJob, Worker
from hddm.settings import ServeSettings
from tests.artefacts import as_traced
from tests.ensemble_files import flow_expert, load_pipeline, write_ensemble

LABELS = [0, 1, 2, 0, 1, 2]
pytestmark = pytest.mark.usefixtures("nothing_compiled_before")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts of two sizes."""
    experts = [flow_expert(seed, num_classes=3, depth=1 + seed % 2) for seed in range(3)]
    return write_ensemble(tmp_path_factory.mktemp("compiled"), experts)


class Backend:
    """Counts how often it compiles; what it makes is the graph as it was."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def _pipe(folder: Path, is_tight: bool = False) -> HDDMPipeline:
    pipe = load_pipeline(folder, offload="disk" if is_tight else "none")
    if is_tight:
        pipe.experts.offload("disk", max(one.size for one in pipe.experts.stored))
    return pipe


def _latents(pipe: HDDMPipeline, strategy: str) -> Tensor:
    given = {"num_inference_steps": 6, "output_type": "latent", "strategy": strategy}
    return pipe(class_labels=LABELS, seed=3, **given).images


@pytest.mark.integration
@pytest.mark.parametrize(
    ("strategy", "is_tight"),
    [("full", False), ("top-1", True)],
    ids=["all stay", "one stays, for batches of any size"],
)
def test_compiled_experts_make_the_same_images(folder: Path, strategy: str, is_tight: bool) -> None:
    with as_traced():
        plain = _latents(_pipe(folder), strategy)
    pipe, backend = _pipe(folder, is_tight), Backend()
    pipe.experts.compile(backend=backend)
    compiled = _latents(pipe, strategy)
    # The router, whose probabilities only `full` weighs by, is not compiled, and rounds otherwise.
    torch.testing.assert_close(compiled, plain, rtol=0, atol=2e-6 if strategy == "full" else 0)
    # One for the blocks of both sizes, for each kind of batch: a single row, one size, and then any size.
    assert 1 <= backend.graphs <= (1 if strategy == "full" else 3)
    before = backend.graphs
    for _ in range(2):
        assert torch.equal(_latents(pipe, strategy), compiled)
    assert backend.graphs == before


@pytest.mark.slow
def test_a_worker_of_a_service_compiles_once_for_all_batch_sizes(folder: Path) -> None:
    plain, compiled = (
        Worker(str(folder), 0, ServeSettings(device="cpu", compile=one), 1) for one in (False, True)
    )
    noise = torch.Generator().manual_seed(0)
    for num in (2, 3, 5):
        x, t = (
            torch.randn(num, 3, 4, 4, generator=noise),
            torch.full((num,), 0.5, dtype=torch.float64),
        )
        job = VelocityJob(x, t, Guidance(1.0), {}, {"class_labels": torch.arange(num) % 3})
        expected, found = (asyncio.run(worker.answer(job)) for worker in (plain, compiled))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
