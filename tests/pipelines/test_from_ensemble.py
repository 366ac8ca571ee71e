"""Pipelines of ensembles in memory: the same samples as theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hddm
from hddm.ensemble import Part
from hddm.experts.assembly import assemble
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.routers import Router
from hddm.schedules import CosineSchedule, LinearSchedule
from tests.artefacts import refusal
from tests.conftest import Trio
from tests.ensemble_files import (
    flow_expert,
    load_ensemble,
    load_pipeline,
    write_ensemble,
    write_text,
)

STEPS = 4
LABELS = torch.tensor([0, 1, 2, 0, 1])
SHAPE = (3, 4, 4)


class Own(nn.Module):
    """A network that hddm has never seen."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mix = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        mixed: Tensor = self.mix(x) * torch.cos(timestep)[:, None, None, None]
        return mixed


def _plain(x: Tensor, timestep: Tensor) -> Tensor:
    return x.tanh() - timestep[:, None, None, None] * x


def _left(x_t: Tensor, t: Tensor) -> Tensor:
    left = x_t.mean((1, 2, 3)).sigmoid()
    return torch.stack([left, 1 - left], 1)


def _pipeline(model: Any, **parts: Any) -> HDDMPipeline:
    pipe = HDDMPipeline.from_ensemble(model, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _made(pipe: HDDMPipeline, labels: Tensor | None = None, **options: Any) -> Tensor:
    given = {"seed": 3, "num_inference_steps": STEPS, "output_type": "latent", **options}
    conditions = {} if labels is None else {"class_labels": labels}
    return pipe(batch_size=5, conditions=conditions, **given).images


def _sampled(model: Any, labels: Tensor | None = None, **options: Any) -> Tensor:
    conditions = {} if labels is None else {"class_labels": labels}
    return hddm.sample(model, 5, 3, STEPS, **conditions, **options)


@pytest.mark.parametrize("strategy", ["top-1", "full", "draw"])
def test_own_networks_and_functions_make_the_samples_of_sample(strategy: str) -> None:
    fields = [
        hddm.VelocityField(Own(0), CosineSchedule(), "epsilon", sample_shape=SHAPE),
        hddm.VelocityField(_plain, LinearSchedule(), "flow_prediction"),
    ]
    ensemble = hddm.Ensemble(fields, _left, strategy, [0.3, 0.7], shift=2.0)
    pipe = _pipeline(ensemble)
    assert torch.equal(_made(pipe), _sampled(ensemble))
    images = pipe(seed=0, num_inference_steps=2, output_type="np").images
    assert images.shape == (1, 4, 4, 3)
    assert torch.equal(_made(HDDMPipeline(**pipe.components)), _sampled(ensemble))
    # What is set on the pipeline stays there.
    pipe.ensemble.strategy = "full"
    assert ensemble.strategy == strategy


def test_networks_are_shared_and_move_along() -> None:
    own, router = Own(0), Router(Own(1), outputs=(0,))
    pipe = _pipeline(
        hddm.Ensemble([hddm.VelocityField(own, LinearSchedule(), "sample", sample_shape=SHAPE)], router)
    )
    pipe.to(torch.float64)
    assert own.mix.weight.dtype == pipe.dtype == torch.float64
    assert router.network.mix.weight.dtype == torch.float64
    words = "an expert was built in memory; load it from a folder"
    assert words in refusal(pipe.enable_model_cpu_offload, device="cpu")


def test_a_loaded_ensemble_makes_its_samples_and_both_can_be_changed_apart(
    trio: Trio, tmp_path: Path
) -> None:
    assemble(trio.experts, tmp_path / "ensemble", trio.router, strategy="nucleus-0.9")
    ensemble, labels = load_ensemble(tmp_path / "ensemble"), LABELS % 2
    for field in ensemble.experts:
        field.null_conditions = {}
    pipe = _pipeline(ensemble)
    made = _made(pipe, labels)
    for options in ({}, {"strategy": "draw"}):
        assert torch.equal(_made(pipe, labels, **options), _sampled(ensemble, labels, **options))
    ensemble.experts[0].time_scale = 900.0
    assert torch.equal(_made(pipe, labels), made)


def test_latents_are_decoded_by_the_vae_and_prompts_encoded(tmp_path: Path) -> None:
    whole = load_pipeline(write_text(tmp_path))
    parts = {name: getattr(whole, name) for name in ("vae", "text_encoder", "tokenizer")}
    pipe = _pipeline(whole.ensemble, **parts)
    given = {"prompt": ["a cat", "a dog"], "seed": 0, "num_inference_steps": 2, "guidance_scale": 3.0}
    assert torch.equal(pipe(**given, output_type="pt").images, whole(**given, output_type="pt").images)


@pytest.mark.parametrize("is_own_router", [False, True])
def test_what_was_made_in_python_cannot_be_saved(is_own_router: bool, tmp_path: Path) -> None:
    if is_own_router:
        folder = write_ensemble(tmp_path / "made", [flow_expert(k) for k in range(2)])
        pipe = HDDMPipeline.from_pretrained(folder, router=_left)
    else:
        pipe = _pipeline(hddm.VelocityField(Own(0), CosineSchedule(), "epsilon", sample_shape=SHAPE))
    assert "combine these with hddm.assemble" in refusal(pipe.save_pretrained, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_samples_of_unknown_shape_and_other_objects_are_refused() -> None:
    nowhere = hddm.VelocityField(_plain, LinearSchedule(), "flow_prediction")
    assert "pass sample_shape=(C, H, W) to VelocityField" in refusal(HDDMPipeline.from_ensemble, nowhere)
    flat = hddm.VelocityField(_plain, LinearSchedule(), "flow_prediction", sample_shape=(2,))
    assert "the experts state (2,)" in refusal(HDDMPipeline.from_ensemble, flat)
    fields = [hddm.VelocityField(_plain, LinearSchedule(), "flow_prediction", sample_shape=(1, 2, 2))] * 2
    two = hddm.Ensemble([Part(one, vae=vae) for one, vae in zip(fields, "ab", strict=True)], strategy="draw")
    assert "state expert 0 VAE 1, expert 1 VAE 2" in refusal(HDDMPipeline.from_ensemble, two)
