"""Callbacks at the end of a step: what they read of a pipeline and change, diffusers' own among them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.callbacks import (
    MultiPipelineCallbacks,
    SDCFGCutoffCallback,
    SDXLCFGCutoffCallback,
)
from torch import Tensor

from hddm.pipelines.pipeline import HDDMPipeline
from hddm.sampling import time_grid
from hddm.solvers import SOLVERS
from hddm.velocity import Guidance
from tests.artefacts import refusal
from tests.ensemble_files import flow_expert, load_pipeline, pipeline_in_memory, write_text

STEPS = 6
LATENT: dict[str, Any] = {"num_inference_steps": STEPS, "output_type": "latent", "seed": 0}
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> HDDMPipeline:
    return load_pipeline(write_text(tmp_path_factory.mktemp("callbacks")))


@pytest.fixture(scope="module")
def classes() -> HDDMPipeline:
    return pipeline_in_memory([flow_expert(seed, num_classes=3) for seed in range(2)])


def _until(step: int) -> Guidance:
    """Guidance that acts up to this step, by Euler's method, and no further."""
    times = time_grid(STEPS)
    return Guidance(4.0, interval=(float(times[step] + times[step + 1]) / 2, 1.0))


def test_the_cutoff_of_diffusers_ends_guidance(text: HDDMPipeline) -> None:
    for prompts, repeats in ((["a cat"], 1), (["a cat"], 3), ("a cat", 2)):
        given = {"prompt": prompts, "num_images_per_prompt": repeats, "solver": "euler", **LATENT}
        for cutoff, last in (
            (SDCFGCutoffCallback(cutoff_step_ratio=0.5), 3),
            (SDCFGCutoffCallback(cutoff_step_ratio=None, cutoff_step_index=1), 1),
            (MultiPipelineCallbacks([SDCFGCutoffCallback(cutoff_step_ratio=None, cutoff_step_index=1)]), 1),
        ):
            found = text(guidance_scale=4.0, callback_on_step_end=cutoff, **given).images
            assert text.guidance_scale == 0.0
            assert not text.do_classifier_free_guidance
            assert torch.equal(found, text(guidance_scale=_until(last), **given).images)
        assert not torch.equal(found, text(guidance_scale=4.0, **given).images)


def test_prompts_of_several_images_are_not_replaced_by_the_last(text: HDDMPipeline) -> None:
    cutoff = SDCFGCutoffCallback(cutoff_step_ratio=0.5)
    given = {"prompt": ["a cat", "a dog"], "guidance_scale": 4.0, "callback_on_step_end": cutoff, **LATENT}
    words = refusal(text, **given)
    assert "returned prompt_embeds of shape (1, 77, 16), and this call has (2, 77, 16)" in words
    assert "make a call for each" in words


def _setting(scale: Callable[[HDDMPipeline], float], at: int = 1) -> Callable[..., None]:
    def callback(pipeline: HDDMPipeline, step: int, timestep: float, tensors: Tensors) -> None:
        if step == at:
            pipeline._guidance_scale = scale(pipeline)

    return callback


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_a_guidance_scale_that_is_set_holds_from_the_next_step(classes: HDDMPipeline, solver: str) -> None:
    given = {"class_labels": [0, 1], "guidance_scale": 4.0, "solver": solver, **LATENT}
    plain = classes(**given).images
    assert classes.guidance_scale == 4.0
    same = classes(callback_on_step_end=_setting(lambda pipeline: pipeline.guidance_scale), **given).images
    assert torch.equal(same, plain)
    more = classes(
        callback_on_step_end=_setting(lambda pipeline: pipeline.guidance_scale + 1), **given
    ).images
    assert classes.guidance_scale == 5.0
    less = classes(callback_on_step_end=_setting(lambda _: 1.0), **given).images
    none = classes(callback_on_step_end=_setting(lambda _: 0.0), **given).images
    assert torch.equal(less, none)
    assert not torch.equal(more, plain)
    assert not torch.equal(none, plain)
    # After the last step nothing is left to guide.
    last = classes(callback_on_step_end=_setting(lambda _: 0.0, STEPS - 1), **given).images
    assert torch.equal(last, plain)


def test_guidance_cannot_begin_within_a_call(classes: HDDMPipeline) -> None:
    words = refusal(classes, class_labels=0, callback_on_step_end=_setting(lambda _: 3.0), **LATENT)
    assert "_guidance_scale in a call that began without" in words


def test_callbacks_read_what_a_call_was_asked_for(classes: HDDMPipeline) -> None:
    seen = []

    def look(pipeline: HDDMPipeline, step: int, timestep: float, tensors: Tensors) -> None:
        seen.append((pipeline.num_timesteps, pipeline.guidance_scale))
        assert pipeline.do_classifier_free_guidance == (pipeline.guidance_scale != 1)
        assert not pipeline.interrupt

    for guidance, expected in ((1.0, (STEPS, 1.0)), (Guidance(3.0, rescale=0.5), (STEPS, 3.0))):
        seen.clear()
        classes(class_labels=0, guidance_scale=guidance, callback_on_step_end=look, **LATENT)
        assert seen == [expected] * STEPS
    seen.clear()
    begin = torch.zeros(1, *classes.experts.facts[0].sample_shape)
    classes(class_labels=0, image=begin, strength=2 / STEPS, callback_on_step_end=look, **LATENT)
    assert seen == [(2, 1.0)] * 2


def test_prompts_can_be_exchanged_on_the_way(text: HDDMPipeline) -> None:
    cat, dog = (text.encode(name).given["encoder_hidden_states"] for name in ("a cat", "a dog"))

    def exchange(pipeline: HDDMPipeline, step: int, timestep: float, tensors: Tensors) -> Tensors:
        assert torch.equal(tensors["prompt_embeds"], dog if step > 2 else cat)
        return {"prompt_embeds": dog} if step == 2 else {}

    names = ["prompt_embeds"]
    # Euler's method has no memory: the rest of the way is that of a dog from the cat's state.
    given = {"solver": "euler", **LATENT}
    found = text("a cat", callback_on_step_end=exchange, callback_on_step_end_tensor_inputs=names, **given)
    states: list[Tensor] = []

    def keep(pipeline: HDDMPipeline, step: int, timestep: float, tensors: Tensors) -> None:
        states.append(tensors["latents"])

    def jump(pipeline: HDDMPipeline, step: int, timestep: float, tensors: Tensors) -> Tensors:
        return {"latents": states[2]} if step == 2 else {}

    cats = text("a cat", callback_on_step_end=keep, **given).images
    assert torch.equal(found.images, text("a dog", callback_on_step_end=jump, **given).images)
    assert not torch.equal(found.images, cats)


WRONG: dict[str, tuple[Tensors, str]] = {
    "name": ({"image": torch.zeros(1)}, "callbacks see 'latents', 'class_labels' in this call, not 'image'"),
    "shape": ({"latents": torch.zeros(1, 3, 4, 4)}, "latents of shape (1, 3, 4, 4), and this call has (2, 3"),
}


@pytest.mark.parametrize(("returned", "words"), WRONG.values(), ids=WRONG)
def test_what_a_call_does_not_have_is_refused(classes: HDDMPipeline, returned: Tensors, words: str) -> None:
    given = {"class_labels": [0, 1], "callback_on_step_end": lambda *_: returned, **LATENT}
    assert words in refusal(classes, **given)


def test_a_callback_of_prompts_needs_prompts(classes: HDDMPipeline) -> None:
    cutoff = SDXLCFGCutoffCallback(cutoff_step_ratio=0.5)
    words = refusal(classes, class_labels=0, guidance_scale=2.0, callback_on_step_end=cutoff, **LATENT)
    assert words == "callbacks see 'latents', 'class_labels' in this call, not 'prompt_embeds'"


def test_class_labels_are_seen_by_their_keyword(classes: HDDMPipeline) -> None:
    def other(pipeline: HDDMPipeline, step: int, timestep: float, tensors: Tensors) -> Tensors:
        return {"class_labels": 1 - tensors["class_labels"]} if step == 0 else {}

    names = ["class_labels"]
    given = {"callback_on_step_end": other, "callback_on_step_end_tensor_inputs": names, **LATENT}
    there = classes(class_labels=[0, 1], **given).images
    assert not torch.equal(there, classes(class_labels=[0, 1], **LATENT).images)
