"""What is changed on a pipeline after it was made: strategy, scheduler, weights, dtype."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler

import hddm
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.sampling import time_grid
from hddm.utils.errors import HddmError
from tests.artefacts import refusal
from tests.ensemble_files import (
    flow_expert,
    load_pipeline,
    pipeline_in_memory,
    write_ensemble,
    write_text,
)

LATENT: dict[str, Any] = {"num_inference_steps": 3, "output_type": "latent", "seed": 0}
NUMBERED = tuple(sorted(str(k) for k in range(12)))


def test_a_number_is_an_index_though_a_class_may_be_called_by_another() -> None:
    # Class folders are sorted as text: "10" is the third.
    pipe = pipeline_in_memory([flow_expert(0, {"classes": NUMBERED}, num_classes=12)])
    assert NUMBERED[2] == "10"
    indices = torch.tensor([2, 10])
    by_hand = hddm.sample(pipe.ensemble, 2, 0, 3, class_labels=indices)
    for labels in (indices, [2, 10], ["10", NUMBERED[10]]):
        assert torch.equal(pipe(class_labels=labels, **LATENT).images, by_hand)


def test_weights_that_were_changed_while_they_were_there_are_saved(tmp_path: Path) -> None:
    pipe = load_pipeline(write_ensemble(tmp_path / "e", [flow_expert(k) for k in range(2)]))
    before = pipe(expert=1, **LATENT).images
    for value in pipe.experts.stored[1].network.parameters():
        value.data.mul_(0.5)
    changed = pipe(expert=1, **LATENT).images
    assert not torch.equal(before, changed)
    pipe.save_pretrained(tmp_path / "saved")
    assert torch.equal(load_pipeline(tmp_path / "saved")(expert=1, **LATENT).images, changed)


def test_a_strategy_set_on_the_ensemble_stays_and_is_saved(tmp_path: Path) -> None:
    pipe = pipeline_in_memory([flow_expert(k) for k in range(3)])
    assert pipe.ensemble.strategy == "top-1"
    pipe.ensemble.strategy = "top-2"
    assert pipe(batch_size=4, **LATENT).expert_use.experts_a_sample == 2
    pipe.save_pretrained(tmp_path / "saved")
    assert HDDMPipeline.from_pretrained(tmp_path / "saved").ensemble.strategy == "top-2"


def test_a_shift_set_on_the_scheduler_is_that_of_the_grid() -> None:
    pipe = pipeline_in_memory([flow_expert(0)])
    times: list[float] = []

    def look(
        owner: HDDMPipeline, step: int, timestep: float, given: dict[str, torch.Tensor]
    ) -> None:
        times.append(timestep / 1000)

    pipe.scheduler.set_shift(5.0)
    pipe(callback_on_step_end=look, **LATENT)
    assert times == pytest.approx(time_grid(3, 5.0)[:3].tolist())


def test_a_scheduler_of_another_grid_is_refused() -> None:
    pipe = pipeline_in_memory([flow_expert(0)])
    for scheduler, message in (
        (
            FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            "with use_dynamic_shifting=True",
        ),
        (
            EulerDiscreteScheduler(),
            "EulerDiscreteScheduler, and hddm's time grid has the shift alone",
        ),
    ):
        pipe.scheduler = scheduler
        assert re.search(message, refusal(pipe, **LATENT))


def test_a_limit_of_memory_holds_in_another_dtype(tmp_path: Path) -> None:
    folder = write_ensemble(tmp_path / "e", [flow_expert(k) for k in range(3)])
    whole = HDDMPipeline.from_pretrained(folder)
    router, expert = 4 * whole.router.num_parameters(), whole.experts.stored[0].size
    enough = router + expert
    pipe = HDDMPipeline.from_pretrained(
        folder, torch_dtype=torch.bfloat16, offload="disk", max_memory=enough
    )
    assert pipe.experts.shelf.budget == enough - router // 2
    pipe.to(torch.float32)
    assert pipe.experts.shelf.budget == expert
    pipe.limit_memory(enough + expert)
    assert pipe.experts.shelf.budget == 2 * expert
    # Without a limit there is room for one.
    pipe.limit_memory(None)
    assert pipe.experts.shelf.budget == expert
    pipe.limit_memory(enough)
    assert "max_memory" in refusal(pipe.to, torch.float64)
    with pytest.raises(HddmError, match="router, VAE and text encoder alone take"):
        HDDMPipeline.from_pretrained(folder, offload="disk", max_memory=router)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.parametrize("offload", ["none", "ram"])
def test_float16_on_a_cpu_makes_images_and_nobody_warns_of_it(tmp_path: Path, offload: Any) -> None:
    folder = write_text(tmp_path / "e")
    kept, log = _Kept(), logging.getLogger("diffusers")
    log.addHandler(kept)
    try:
        pipe = HDDMPipeline.from_pretrained(folder, dtype=torch.float16, offload=offload)
        images = pipe.to("cpu")("a cat", **LATENT).images
    finally:
        log.removeHandler(kept)
    assert images.isfinite().all()
    assert kept.messages == []
