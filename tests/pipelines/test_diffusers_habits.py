"""What users of diffusers do with any pipeline: here it works, or one line says why not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hddm.pipelines.pipeline import HDDMPipeline
from tests.ensemble_files import flow_expert, load_pipeline, pipeline_in_memory, write_ensemble

LATENT: dict[str, Any] = {"num_inference_steps": 3, "output_type": "latent", "seed": 0}
LABELS = [0, 1, 2, 0, 1, 2]
CLASS_PRIOR = [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three class-conditional experts of pixels behind a router."""
    experts = [flow_expert(seed, num_classes=3) for seed in range(3)]
    return write_ensemble(tmp_path_factory.mktemp("habits"), experts)


def _images(pipe: HDDMPipeline, **options: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    return pipe(**{"class_labels": LABELS, **LATENT, **options}).images


def test_components_make_the_same_pipeline(folder: Path) -> None:
    experts = [flow_expert(seed, num_classes=3) for seed in range(3)]
    in_memory = pipeline_in_memory(experts, "nucleus-0.7", [0.2, 0.3, 0.5], CLASS_PRIOR, shift=2.0)
    for pipe in (in_memory, load_pipeline(folder, experts=[2, 0])):
        again = HDDMPipeline(**pipe.components)
        assert torch.equal(_images(again), _images(pipe))
        assert again.facts == pipe.facts
        # As it was set, and not as it was read.
        pipe.ensemble.strategy = "top-2"
        again = HDDMPipeline(**pipe.components)
        assert again.ensemble.strategy == "top-2"
        assert torch.equal(_images(again), _images(pipe))
        assert torch.equal(_images(HDDMPipeline.from_pipe(pipe)), _images(pipe))


def test_facts_that_are_passed_are_those_of_one_pipeline_alone(folder: Path) -> None:
    pipe = load_pipeline(folder)
    facts = pipe.facts.model_copy(update={"strategy": "top-1"})
    other = HDDMPipeline(**pipe.components, facts=facts)
    assert (other.ensemble.strategy, pipe.ensemble.strategy) == ("top-1", "nucleus-0.9")
    assert HDDMPipeline(**pipe.components).ensemble.strategy == "nucleus-0.9"
    # Weights are shared all the same.
    other.to(torch.float64)
    assert pipe.experts.dtype == other.experts.dtype == pipe.router.dtype == torch.float64


def test_a_pipeline_that_lost_its_router_is_saved_without(folder: Path, tmp_path: Path) -> None:
    pipe = load_pipeline(folder, experts=[2, 0])
    pipe = HDDMPipeline(**pipe.components, facts=pipe.facts.model_copy(update={"strategy": "draw"}))
    assert pipe.facts.router_outputs == (2, 0)
    pipe.router = None
    made = _images(pipe, class_labels=None, batch_size=6)
    pipe.save_pretrained(tmp_path / "saved")
    again = load_pipeline(tmp_path / "saved")
    assert again.router is None
    assert torch.equal(_images(again, class_labels=None, batch_size=6), made)
