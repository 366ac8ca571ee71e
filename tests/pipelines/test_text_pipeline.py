"""From prompts to images, against the steps done by hand with transformers and diffusers; parts that wait."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

import hddm
from hddm.experts.expert import Expert
from hddm.experts.expert_set import ExpertSet
from hddm.guidance import Guidance
from hddm.networks.offload import Offload, size_of
from hddm.pipelines.parts import Offloading
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.errors import HddmError
from tests.artefacts import Command, refusal
from tests.ensemble_files import (
    flow_expert,
    load_pipeline,
    random_router,
    text_experts,
    write_ensemble,
    write_text,
)

STEPS: dict[str, Any] = {"seed": 7, "num_inference_steps": 4, "output_type": "pt"}
GUIDED = STEPS | {"guidance_scale": 3.0}
PROMPTS = ["a cat", "two dogs on a lawn", "cat"]
TEXT = "encoder_hidden_states"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("kl"))


@pytest.fixture(scope="module")
def pipe(folder: Path) -> HDDMPipeline:
    return load_pipeline(folder)


class ByHand:
    """The steps of a text-to-image pipeline, with the tools whose files these are."""

    def __init__(self, folder: Path) -> None:
        kind = type(HDDMPipeline.from_pretrained(folder).vae)
        self.vae = kind.from_pretrained(folder / "vae").eval()
        self.encoder = CLIPTextModel.from_pretrained(folder / "text_encoder").eval()
        self.tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
        self.model = hddm.load(folder)

    @torch.no_grad()
    def embed(self, prompts: Sequence[str]) -> Tensor:
        tokens = self.tokenizer(
            list(prompts), padding="max_length", max_length=77, truncation=True, return_tensors="pt"
        )
        embedded: Tensor = self.encoder(tokens.input_ids).last_hidden_state
        return embedded

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        z = latents / config["scaling_factor"] + (config.get("shift_factor") or 0.0)
        images: Tensor = self.vae.decode(z).sample
        return (images.clamp(-1, 1) + 1) / 2

    def images(
        self, given: Tensor, against: Tensor | None = None, scale: float | Guidance = 1.0
    ) -> Tensor:
        """For the embeddings of prompts, a row an image, under seed 7."""
        guided = {"guidance_scale": scale}
        if against is not None:
            guided["negative"] = {"encoder_hidden_states": against}
        return self.decode(
            hddm.sample(self.model, len(given), 7, 4, encoder_hidden_states=given, **guided)
        )


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> ByHand:
    return ByHand(folder)


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert expected.flatten(1).std(1).min() > 0.05


def test_prompts_become_images(pipe: HDDMPipeline, by_hand: ByHand) -> None:
    found = pipe(PROMPTS, **STEPS).images
    assert found.shape == (3, 3, 8, 8)
    _close(found, by_hand.images(by_hand.embed(PROMPTS)))
    latents = pipe(PROMPTS, **STEPS | {"output_type": "latent"}).images
    _close(found, by_hand.decode(latents))
    assert [image.size for image in pipe(PROMPTS, num_inference_steps=1).images] == [(8, 8)] * 3
    # Prompts matter.
    other = pipe(["dog", "dog", "dog"], **STEPS).images
    assert (other - found).abs().flatten(1).amax(1).min() > 1e-3


@pytest.mark.parametrize(
    "guidance", [3.0, Guidance(5.0, interval=(0.3, 0.9), rescale=0.7)], ids=str
)
def test_guidance_moves_away_from_the_empty_prompt_or_the_negative_one(
    pipe: HDDMPipeline, by_hand: ByHand, guidance: float | Guidance
) -> None:
    text = by_hand.embed(PROMPTS)
    found = pipe(PROMPTS, guidance_scale=guidance, **STEPS).images
    _close(found, by_hand.images(text, by_hand.embed([""] * 3), guidance))
    for negative, texts in (("blurry", ["blurry"] * 3), (["a", "b", "cat"], ["a", "b", "cat"])):
        found = pipe(PROMPTS, negative_prompt=negative, guidance_scale=guidance, **STEPS).images
        _close(found, by_hand.images(text, by_hand.embed(texts), guidance))


def test_one_prompt_or_negative_prompt_stands_for_all(pipe: HDDMPipeline, by_hand: ByHand) -> None:
    text, blurry = by_hand.embed(PROMPTS), by_hand.embed(["blurry"])
    expected = by_hand.images(text, blurry.expand(3, -1, -1), 3.0)
    for negative in ({"negative_prompt": ["blurry"]}, {"negative_conditions": {TEXT: blurry}}):
        _close(pipe(PROMPTS, **negative, **GUIDED).images, expected)
    three = by_hand.embed(["a", "b", "cat"])
    found = pipe("a cat", negative_conditions={TEXT: three}, **GUIDED).images
    _close(found, by_hand.images(text[:1].expand(3, -1, -1), three, 3.0))


def test_embeddings_stand_for_prompts(pipe: HDDMPipeline, by_hand: ByHand) -> None:
    text, none = by_hand.embed(PROMPTS), by_hand.embed(["", "", ""])
    plain = pipe(PROMPTS, **GUIDED).images
    embedded = {"conditions": {TEXT: text}, "negative_conditions": {TEXT: none}}
    _close(pipe(**embedded, **GUIDED).images, plain)
    without = HDDMPipeline(pipe.experts, pipe.scheduler, pipe.router, pipe.vae, record=pipe.record)
    without.set_progress_bar_config(disable=True)
    _close(without(**embedded, **GUIDED).images, plain)
    # Without a negative one, what the experts record as no text: zeros.
    unopposed = without(conditions={TEXT: text}, **GUIDED).images
    _close(unopposed, by_hand.images(text, torch.zeros_like(text), 3.0))


def test_several_images_of_a_prompt_stand_side_by_side(pipe: HDDMPipeline) -> None:
    found = pipe(PROMPTS[:2], num_images_per_prompt=2, negative_prompt=["a", "b"], **GUIDED).images
    repeated = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    assert torch.equal(found, pipe(repeated, negative_prompt=["a", "a", "b", "b"], **GUIDED).images)


def test_parts_that_wait_in_memory_make_the_same_images(folder: Path, pipe: HDDMPipeline) -> None:
    waiting = load_pipeline(folder)
    for _ in range(2):
        waiting.enable_model_cpu_offload(device="cpu")
    assert torch.equal(waiting(PROMPTS, **GUIDED).images, pipe(PROMPTS, **GUIDED).images)


def test_a_limit_of_memory_counts_every_part(folder: Path) -> None:
    pipe = HDDMPipeline.from_pretrained(folder)
    fixed = sum(4 * part.num_parameters() for part in (pipe.vae, pipe.text_encoder, pipe.router))
    room = max(network.size for network in pipe.experts.stored)
    limited = HDDMPipeline.from_pretrained(folder, offload="disk", max_memory=fixed + room)
    assert limited.experts.shelf.budget == room
    with pytest.raises(HddmError, match="`max_memory` leaves"):
        HDDMPipeline.from_pretrained(folder, offload="disk", max_memory=fixed + room - 1)


EMBEDS = {TEXT: torch.zeros(1, 77, 16)}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two prompts": ({"prompt": "a", "conditions": EMBEDS}, "encoder_hidden_states has two sources"),
    "two negative ones": (
        {
            "prompt": "a",
            "negative_prompt": "b",
            "negative_conditions": EMBEDS,
            "guidance_scale": 2.0,
        },
        "encoder_hidden_states has two sources",
    ),
    "rows": (
        {"prompt": ["a", "b", "c"], "negative_prompt": ["a", "b"], "guidance_scale": 2.0},
        "condition 'encoder_hidden_states' has 2 rows for 3 samples",
    ),
    "classes": ({"prompt": "a", "class_labels": 0}, "no expert takes both; pass one of the two"),
}


@pytest.mark.parametrize(("given", "words"), WRONG.values(), ids=WRONG)
def test_contradicting_prompts_are_refused(
    pipe: HDDMPipeline, given: dict[str, Any], words: str
) -> None:
    assert re.search(words, refusal(pipe, **given, **STEPS))


def test_experts_without_a_null_text_take_prompts_of_both_sides(tmp_path: Path) -> None:
    experts = [Expert(one.network, one.record, None) for one in text_experts()]
    bare = load_pipeline(write_ensemble(tmp_path, experts))
    text = torch.randn(1, 77, 16, generator=torch.Generator().manual_seed(0))
    options = {"seed": 0, "num_inference_steps": 2, "output_type": "latent", "guidance_scale": 2.0}
    given = {"conditions": {TEXT: text}}
    assert bare(**given, negative_conditions={TEXT: -text}, **options).images.isfinite().all()
    assert "guidance needs the same keywords on both sides" in refusal(bare, **given, **options)
    with pytest.raises(
        HddmError, match="the experts need encoder_hidden_states and have no empty default"
    ):
        bare(**{**options, "guidance_scale": 1.0})


def test_a_missing_text_is_refused_before_the_first_step(tmp_path: Path, hddm: Command) -> None:
    latents = {"space": "latents", "latent_scale": None}
    by_class = flow_expert(0, latents, in_channels=4, num_classes=3)
    by_text = text_experts(1)[0]
    bare = Expert(by_text.network, by_text.record, None)
    both = write_ensemble(tmp_path, [by_class, bare], "draw")
    options = (
        "--num-images",
        12,
        "--steps",
        1,
        "--output-type",
        "latent",
        "--out",
        tmp_path / "out",
    )
    code, out, error = hddm("sample", both, *options)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert (
        "--prompt or --conditions: the experts need encoder_hidden_states and have no empty"
        in error
    )
    with pytest.raises(HddmError, match="the experts need encoder_hidden_states"):
        load_pipeline(both)(batch_size=12, seed=0, output_type="latent")
    assert not (tmp_path / "out").exists()
    assert hddm("sample", both, *options, "--expert", 0)[0] == 0


class Traveller(nn.Module):
    """A part that keeps the places that it was sent to, and stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def to(self, device: torch.device | str) -> "Traveller":  # type: ignore[override]
        self.places.append(str(device))
        return self


class Parts(Offloading):
    """What of a pipeline comes and goes."""

    def __init__(self) -> None:
        self.experts = ExpertSet([flow_expert(seed) for seed in range(2)])
        self.router, _ = random_router(2)
        self.vae, self.text_encoder = Traveller(), Traveller()


def test_offloaded_parts_wait_on_the_cpu_until_they_are_used_and_experts_do_not() -> None:
    parts = Parts()
    with parts.present(parts.vae):
        pass
    assert parts.vae.places == []
    parts.enable_model_cpu_offload(device="meta")
    assert (parts.vae.places, parts.text_encoder.places) == (["cpu"], ["cpu"])
    with parts.present(parts.vae):
        assert parts.vae.places == ["cpu", "meta"]
    assert (parts.vae.places, parts.text_encoder.places) == (["cpu", "meta", "cpu"], ["cpu"])
    assert parts.experts.device.type == "meta"
    assert {weight.device.type for weight in parts.router.parameters()} == {"meta"}
    with pytest.raises(ZeroDivisionError), parts.present(parts.vae):
        raise ZeroDivisionError
    assert parts.vae.places[-2:] == ["meta", "cpu"]


@pytest.mark.parametrize("mode", ["ram", "disk"])
def test_where_experts_are_offloaded_vae_and_text_encoder_wait_too(
    folder: Path, mode: Offload
) -> None:
    pipe = HDDMPipeline.from_pretrained(folder, offload=mode)
    pipe.to("meta")
    assert pipe.experts.device.type == "meta"
    for part in (pipe.vae, pipe.text_encoder):
        assert part.device.type == "cpu"
    plain = HDDMPipeline.from_pretrained(folder)
    plain.to("meta")
    assert plain.vae.device.type == "meta"


def test_parts_that_come_and_go_count_once_in_the_limit(folder: Path) -> None:
    pipe = HDDMPipeline.from_pretrained(folder, offload="ram")
    sizes = [size_of(part) for part in (pipe.vae, pipe.text_encoder)]
    most = sum(sizes) + size_of(pipe.router) + pipe.experts.stored[0].size
    with pytest.raises(HddmError, match="`max_memory` leaves"):
        pipe.limit_memory(most - 1)
    pipe.limit_memory(most)
    pipe.to("meta")
    pipe.limit_memory(most - min(sizes))
    with pytest.raises(HddmError, match="`max_memory` leaves"):
        pipe.limit_memory(most - min(sizes) - 1)
