"""HDDMPipeline as users of diffusers know pipelines: seeds, callbacks, outputs, and clear refusals."""

from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor

import hddm
from hddm.conditions import Conditions
from hddm.data.images import to_bytes
from hddm.guidance import Guidance
from hddm.noise import Seeded
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.sampling import integrate, time_grid
from hddm.solvers import SOLVERS
from hddm.utils.errors import HddmError
from tests.ensemble_files import flow_expert, pipeline_in_memory, text_experts

STEPS = {"num_inference_steps": 4}
LATENT: dict[str, Any] = {**STEPS, "output_type": "latent"}
LABELS = ["cat", "7", "dog", "cat", "7"]
INDICES = torch.tensor([0, 2, 1, 0, 2])
CLASS_PRIOR = [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]]


@pytest.fixture(scope="module")
def pipe() -> HDDMPipeline:
    """Three class-conditional experts of pixels, routed."""
    experts = [flow_expert(seed, num_classes=3) for seed in range(3)]
    return pipeline_in_memory(experts, class_prior=CLASS_PRIOR, shift=2.0)


@pytest.mark.parametrize("strategy", ["top-1", "nucleus-0.7", "full", "draw", "commit-0.6"])
@pytest.mark.parametrize("guidance", [1.0, 3.0, Guidance(4.0, 2, (0.2, 0.8), 0.5)], ids=str)
def test_images_are_those_of_sample(
    pipe: HDDMPipeline, strategy: str, guidance: float | Guidance
) -> None:
    # Under `draw` no router runs.
    every = 1 if strategy == "draw" else 2
    for solver in ("euler", "heun"):
        given = {"strategy": strategy, "solver": solver, "guidance_scale": guidance, "start": 2}
        found = pipe(class_labels=LABELS, seed=5, router_every=every, **given, **LATENT).images
        expected = hddm.sample(
            pipe.ensemble, 5, 5, 4, router_every=every, class_labels=INDICES, **given
        )
        # `draw` sorts its batches by expert there.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    other = pipe(class_labels=LABELS, seed=6, strategy=strategy, **LATENT).images
    assert (other - found).flatten(1).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("strategy", ["top-1", "draw"])
def test_a_generator_an_image_makes_it_the_same_in_any_batch(
    pipe: HDDMPipeline, strategy: str
) -> None:
    def generators(seeds: range) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    whole = pipe(
        class_labels=LABELS, generator=generators(range(5)), strategy=strategy, **LATENT
    ).images
    for start, stop in ((0, 1), (1, 3), (3, 5)):
        given = {"generator": generators(range(start, stop)), "strategy": strategy}
        part = pipe(class_labels=LABELS[start:stop], **given, **LATENT).images
        torch.testing.assert_close(part, whole[start:stop], rtol=1e-5, atol=1e-5)


def test_every_output_type_shows_the_same_images(pipe: HDDMPipeline) -> None:
    def images(kind: str) -> Any:
        return pipe(class_labels=LABELS, seed=1, output_type=kind, **STEPS).images

    latent, pt, array, pil = images("latent"), images("pt"), images("np"), images("pil")
    assert latent.abs().max() > 1
    torch.testing.assert_close(pt, (latent.clamp(-1, 1) + 1) / 2)
    np.testing.assert_array_equal(array, pt.permute(0, 2, 3, 1).numpy())
    assert all(isinstance(image, PIL.Image.Image) for image in pil)
    bytes_ = np.stack([np.asarray(image) for image in pil])
    np.testing.assert_array_equal(bytes_, to_bytes(latent).permute(0, 2, 3, 1).numpy())
    (alone,) = pipe(class_labels=LABELS, seed=1, output_type="np", return_dict=False, **STEPS)
    np.testing.assert_array_equal(alone, array)


def test_classes_have_names_and_numbers(pipe: HDDMPipeline) -> None:
    by_name = pipe(class_labels=LABELS, seed=0, **LATENT).images
    for same in (INDICES, ["0", "7", 1, "cat", 2], [np.int64(k) for k in INDICES]):
        assert torch.equal(pipe(class_labels=same, seed=0, **LATENT).images, by_name)
    one = pipe(class_labels="dog", num_images_per_prompt=3, seed=0, **LATENT).images
    assert torch.equal(one, pipe(class_labels=[1, 1, 1], seed=0, **LATENT).images)
    same = pipe(class_labels="dog", batch_size=3, seed=0, **LATENT).images
    assert torch.equal(same, one)
    two = pipe(class_labels=["dog", "cat"], num_images_per_prompt=2, seed=0, **LATENT).images
    assert torch.equal(two, pipe(class_labels=[1, 1, 0, 0], seed=0, **LATENT).images)
    # No class at all is the networks' null class, the number after the last.
    none = pipe(batch_size=2, seed=0, **LATENT).images
    null, grid = {"class_labels": torch.tensor([3, 3])}, time_grid(4, pipe.ensemble.shift)
    noise = Seeded(0).initial(range(2), (3, 4, 4))
    assert torch.equal(none, integrate(pipe.ensemble, noise, grid, Conditions(null)))


def test_a_callback_sees_every_step_and_may_change_the_state(pipe: HDDMPipeline) -> None:
    seen: list[tuple[int, float]] = []

    def look(owner: HDDMPipeline, step: int, timestep: float, given: dict[str, Tensor]) -> None:
        assert owner is pipe
        assert given["latents"].shape == (5, 3, 4, 4)
        seen.append((step, timestep))

    plain = pipe(class_labels=LABELS, seed=0, **LATENT).images
    looked = pipe(class_labels=LABELS, seed=0, callback_on_step_end=look, **LATENT).images
    assert torch.equal(looked, plain)
    times = [1000 * 2 * u / (1 + u) for u in (1, 0.75, 0.5, 0.25)]
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert [timestep for _, timestep in seen] == pytest.approx(times)

    def replace(
        owner: object, step: int, timestep: float, given: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        return {"latents": torch.full_like(given["latents"], 0.5)} if step == 3 else {}

    assert (
        pipe(class_labels=LABELS, seed=0, callback_on_step_end=replace, **LATENT).images == 0.5
    ).all()


@pytest.mark.parametrize("solver", list(SOLVERS))
def test_an_interrupted_call_stops_where_it_is(pipe: HDDMPipeline, solver: str) -> None:
    states: list[Tensor] = []

    def stop(owner: HDDMPipeline, step: int, timestep: float, given: dict[str, Tensor]) -> None:
        states.append(given["latents"])
        owner._interrupt = step == 1

    calls: list[int] = []
    hooks = [
        one.network.register_forward_hook(lambda *_: calls.append(len(states)))
        for one in pipe.experts.stored
    ]
    stopped = pipe(
        class_labels=LABELS, seed=0, solver=solver, callback_on_step_end=stop, **LATENT
    ).images
    for hook in hooks:
        hook.remove()
    assert len(states) == 2
    assert torch.equal(stopped, states[1])
    assert max(calls) == 1
    states.clear()
    whole = pipe(class_labels=LABELS, seed=0, solver=solver, **LATENT).images
    assert not torch.equal(whole, stopped)


def test_casting_reaches_every_part_and_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pipe = pipeline_in_memory([flow_expert(0), flow_expert(1)])
    caplog.clear()
    double, single = torch.float64, torch.float32
    for given, options, dtype in (
        ((double,), {}, double),
        (("cpu", single), {}, single),
        ((), {"dtype": double}, double),
        (("cpu",), {}, double),
    ):
        assert pipe.to(*given, **options) is pipe
        assert {part.dtype for part in (pipe, *pipe.experts.stored, pipe.router)} == {dtype}
    assert caplog.records == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "prompt": (
        {"prompt": "a bird"},
        "these experts take classes, and it names none of cat, dog, 7",
    ),
    "latents": (
        {"latents": torch.zeros(2, 3, 4, 4)},
        r"latents have shape \(2, 3, 4, 4\); 1 images need",
    ),
    "class": ({"class_labels": "bird"}, "no class 'bird'; the model's classes are cat, dog, 7"),
    "null": ({"class_labels": [0, 3]}, "no class 3; the model's classes are cat, dog, 7"),
    "twice": (
        {"class_labels": 0, "conditions": {"class_labels": torch.tensor([1])}},
        "class_labels has two sources",
    ),
    "start": ({"start": 4}, "start 4 counts the images of a seed; pass one"),
    "seeds": ({"seed": 1, "generator": torch.Generator()}, "a seed or a generator, not both"),
    "few": (
        {"class_labels": [0, 1], "batch_size": 3},
        "condition 'class_labels' has 2 rows for 3 samples",
    ),
    "experts": ({"expert": 3}, "`expert` 3: choose from 0 to 2"),
    "condition": ({"conditions": {"caption": torch.zeros(1)}}, "this model takes no condition"),
}


@pytest.mark.parametrize(("given", "words"), WRONG.values(), ids=WRONG)
def test_wrong_calls_are_refused_in_one_line(
    pipe: HDDMPipeline, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(HddmError, match=words) as caught:
        pipe(**given)
    assert "\n" not in str(caught.value)


def test_latents_need_a_vae_to_become_images() -> None:
    pipe = pipeline_in_memory(text_experts())
    adding = r"add vae, text_encoder and tokenizer \(vae=, text_encoder=, tokenizer=\)"
    with pytest.raises(HddmError, match=f"has no VAE; {adding}, or use `output_type` latent"):
        pipe(conditions={"encoder_hidden_states": torch.zeros(1, 77, 16)})
