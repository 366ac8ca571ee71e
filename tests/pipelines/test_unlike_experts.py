"""Experts that take other conditions than each other: who makes an image, and what the record says of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hddm.data.images import have_equal_pixels
from hddm.experts.topics import topic_of
from hddm.networks.identity import TextEncoderRecord
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.pipelines.sample_records import lines_of
from hddm.topic_records import TopicRecord
from tests.artefacts import Command, refusal
from tests.ensemble_files import flow_expert, pipeline_in_memory, text_experts, write_unlike

pytestmark = pytest.mark.filterwarnings("ignore:.*only the shares do")
LATENT: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent", "seed": 0}
FAST = ("--steps", 2, "--num-images", 9)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_unlike(tmp_path_factory.mktemp("unlike"))


@pytest.fixture(scope="module")
def pipe(unlike: Path) -> HDDMPipeline:
    made = HDDMPipeline.from_pretrained(unlike)
    made.set_progress_bar_config(disable=True)
    return made


def _record(hddm: Command, *words: object) -> dict[str, Any]:
    """The record of images that ``hddm sample`` makes of these words, which end with the folder."""
    code, _, error = hddm("sample", *words[:-1], "--out", words[-1])
    assert code == 0, error
    found: dict[str, Any] = json.loads((Path(str(words[-1])) / "sampling.json").read_text())
    return found


@pytest.mark.parametrize("strategy", ["draw", "full", "top-1", "commit-0.5"])
def test_an_expert_without_text_has_no_part_in_an_image_of_a_prompt(
    pipe: HDDMPipeline, strategy: str
) -> None:
    use = pipe("a cat", num_images_per_prompt=16, strategy=strategy, **LATENT).expert_use
    assert use.shares[1] == 0
    free = pipe(batch_size=16, strategy=strategy, **LATENT).expert_use
    assert free.shares[1] > 0


def test_one_expert_that_cannot_take_the_prompt_is_refused(pipe: HDDMPipeline) -> None:
    told = refusal(pipe, "a cat", expert=1, **LATENT)
    assert told == "expert 1 cannot take the prompt; use another expert, or leave it out"


def test_prompts_that_name_a_class_go_to_experts_of_text_or_of_that_class() -> None:
    latents = {"space": "latents", "latent_scale": None}
    by_class = flow_expert(0, latents | {"classes": ("dog", "ship")}, in_channels=4, num_classes=2)
    blind = flow_expert(1, latents, in_channels=4)
    pipe = pipeline_in_memory([by_class, blind], "draw")
    assert pipe.encode(["a dog", "ships, a ship"]).prior.tolist() == [[1, 0]] * 2  # type: ignore[union-attr]
    assert "it names none of dog, ship" in refusal(pipe.encode, ["a dog", "a cat"])
    for strategy in ("draw", "full"):
        use = pipe(class_labels=["dog"] * 12, strategy=strategy, **LATENT).expert_use
        assert use.shares.tolist() == [1, 0]
    assert "expert 1 cannot take the class" in refusal(pipe, class_labels="dog", expert=1, **LATENT)


def test_a_prompt_whose_embedding_is_no_number_is_not_routed_by_the_class_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    latents = {"space": "latents", "latent_scale": None, "classes": ("dog", "ship")}
    encoder = TextEncoderRecord(kind="CLIPTextModel", fingerprint="0" * 16, tokens=77, width=2)
    experts = []
    for k in range(2):
        topic = topic_of(torch.eye(2)[k : k + 1])
        known = TopicRecord(
            count=1, source="the test", variance=topic.variance, text_encoder=encoder
        )
        one = flow_expert(k, latents, in_channels=4, num_classes=2)
        experts.append(replace(one, topic=replace(topic, record=known)))
    pipe = pipeline_in_memory(experts, "draw")
    for value, told in ((1.0, None), (torch.nan, "prompt 'a dog'")):
        found = torch.full((1, 2), value)
        monkeypatch.setattr(type(pipe), "_embed", lambda *_, found=found, **__: ({}, found))
        if told is None:
            assert pipe.encode("a dog").prior is not None
        else:
            assert told in refusal(pipe.encode, "a dog")


@pytest.fixture(scope="module")
def both() -> HDDMPipeline:
    """An expert of text, one of classes, and one of both, in memory and without a text encoder."""
    latents = {"space": "latents", "latent_scale": None}
    classes = {"classes": ("dog", "ship")}
    of_text = text_experts(1)[0]
    of_classes = flow_expert(1, latents | classes, in_channels=4, num_classes=2)
    of_both = flow_expert(2, latents | classes, in_channels=4, text_dim=16, num_classes=2)
    return pipeline_in_memory([of_text, of_classes, of_both], "draw")


def test_a_prompt_beside_a_class_is_for_experts_that_take_both(
    both: HDDMPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = {"encoder_hidden_states": torch.zeros(2, 77, 16)}
    monkeypatch.setattr(type(both), "_embed", lambda *_, **__: (tokens, None))
    found = both.encode(["a cat", "a dog"], ["dog", "dog"])
    assert found.prior is not None
    assert found.prior.tolist() == [[0, 0, 1]] * 2
    parts = [both.experts.experts[k] for k in (0, 1)]
    other = pipeline_in_memory(parts, "draw")
    told = refusal(other.encode, ["a cat", "a dog"], ["dog", "dog"])
    assert told == "`prompt`, `class_labels`: no expert takes both; pass one of the two"
    alone = pipeline_in_memory(parts[1:], "draw")
    assert "these experts take classes alone; pass one of the two" in refusal(
        alone.encode, "a dog", "dog"
    )


def test_prompts_and_classes_of_unequal_numbers_repeat_no_embedding(
    both: HDDMPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One number in memory; a copy of a row takes terabytes.
    tokens = {"encoder_hidden_states": torch.zeros(()).expand(2, 10**6, 10**6)}
    monkeypatch.setattr(type(both), "_embed", lambda *_, **__: (tokens, None))
    found = both.encode(["a cat", "a dog"], ["dog", "ship", "dog"])
    assert found.given["encoder_hidden_states"] is tokens["encoder_hidden_states"]
    assert found.prior is not None
    assert found.prior.tolist() == [[0, 0, 1]] * 6


def test_the_record_says_which_expert_made_which_image(
    unlike: Path, tmp_path: Path, hddm: Command
) -> None:
    whole = _record(hddm, unlike, *FAST, tmp_path / "whole")["expert_use"]
    assert whole["names"] == ["experts/0", "experts/1", "experts/2"]
    (line,) = whole["made_by"].values()
    makers = line.split()
    assert [makers.count(str(k)) / 9 for k in range(3)] == pytest.approx(whole["shares"], abs=1e-4)
    assert set(makers) == {"0", "1", "2"}
    # It depends on seed and number alone.
    part = _record(
        hddm,
        unlike,
        "--steps",
        1,
        "--num-images",
        4,
        "--start",
        3,
        "--batch-size",
        2,
        tmp_path / "p",
    )
    assert part["expert_use"]["made_by"] == {"00003": " ".join(makers[3:7])}
    text = _record(hddm, unlike, *FAST, "--prompt", "a cat", tmp_path / "text")["expert_use"]
    assert set(" ".join(text["made_by"].values()).split()) == {"0", "2"}
    for k in (0, 2):
        one = _record(hddm, unlike, *FAST, "--expert", k, tmp_path / f"one{k}")["expert_use"]
        assert one["made_by"] == {"00000": " ".join([str(k)] * 9)}
        for number, maker in enumerate(makers):
            names = [tmp_path / folder / f"{number:05d}.png" for folder in ("whole", f"one{k}")]
            assert have_equal_pixels(*names) == (maker == str(k)), number
    mixed = _record(hddm, unlike, *FAST, "--strategy", "full", tmp_path / "mixed")["expert_use"]
    assert "made_by" not in mixed
    committed = _record(hddm, unlike, *FAST, "--strategy", "commit-0.6", tmp_path / "committed")[
        "expert_use"
    ]
    assert len(committed["made_by"]["00000"].split()) == 9


def test_experts_of_many_images_are_fifty_to_a_line() -> None:
    found = lines_of({7 + number: number % 11 for number in range(120)})
    assert list(found) == ["00007", "00057", "00107"]
    assert found["00007"].startswith("0 1 2 3 4 5 6 7 8 9 10 0")
    assert [len(line.split()) for line in found.values()] == [50, 50, 20]


WITHOUT_EFFECT: list[tuple[tuple[object, ...], str]] = [
    (
        ("--prompt", "cat", "--negative-prompt", "dog"),
        "--negative-prompt, or negative conditions: no effect at",
    ),
    (
        ("--negative-prompt", "dog", "--guidance-scale", 2),
        "--negative-prompt: guides a --prompt away from it",
    ),
    (("--resampling-steps", 10), "--resampling-steps 10 needs a picture"),
    (("--strength", 0.5), "--strength 0.5 needs a picture"),
    (("--edit-from", "cat"), "--edit-from needs a picture"),
    (("--router-every", 2), "--router-every 2: no router runs, since strategy draw keeps one"),
    (("--guide-by", "weak"), "--guide-by weak: has no effect at --guidance-scale 1"),
    (("--cfg-channels", 3), "--cfg-channels 3: has no effect at --guidance-scale 1"),
    (
        ("--guidance-interval", 0.1, 0.8),
        "--guidance-interval 0.1 0.8: has no effect at --guidance-scale 1",
    ),
    (("--guidance-rescale", 0.7), "--guidance-rescale 0.7: has no effect at --guidance-scale 1"),
    (("--output-type", "latent", "--grid"), "--grid: there is no sheet of latents"),
    (("--expert", 1, "--prompt", "cat"), "expert 1 cannot take the prompt"),
    (("--prompt", "half \udce9"), "--prompt: has half a character (U+DCE9)"),
]


@pytest.mark.parametrize(("options", "words"), WITHOUT_EFFECT, ids=str)
def test_an_option_without_effect_is_refused_in_one_line(
    options: tuple[object, ...], words: str, unlike: Path, tmp_path: Path, hddm: Command
) -> None:
    code, _, error = hddm("sample", unlike, *FAST, *options, "--out", tmp_path / "out")
    assert (code in (1, 2), error.count("\n")) == (True, 1), error
    assert words in error
    assert list(tmp_path.iterdir()) == []


def test_an_empty_negative_prompt_is_none(pipe: HDDMPipeline) -> None:
    """Programs that know diffusers pass it by default."""
    for given in ({}, {"prompt": "a cat"}, {"prompt": "a cat", "guidance_scale": 2.0}):
        images = [pipe(**given, **more, **LATENT).images for more in ({}, {"negative_prompt": ""})]
        assert torch.equal(*images)


def test_prompts_that_no_image_is_for_are_named(
    unlike: Path, tmp_path: Path, hddm: Command
) -> None:
    prompts = [word for text in ("a", "b", "c") for word in ("--prompt", text)]
    options = (*prompts, "--steps", 1, "--num-images", 2)
    told = "--prompt: the last 1 of 3 make no image, as --num-images is 2"
    assert told in hddm("sample", unlike, *options, "--out", tmp_path / "first")[2]
    # A later part of the same images.
    assert told not in hddm("sample", unlike, *options, "--start", 2, "--out", tmp_path / "rest")[2]


@pytest.mark.parametrize("prompt", [[], "a \ud800", [b"cat"]], ids=str)
def test_what_is_no_prompt_is_refused_in_one_line(pipe: HDDMPipeline, prompt: Any) -> None:
    words = {"[]": "an empty list", "a \ud800": "has half a character (U+D800)"}
    for name in ("prompt", "negative_prompt"):
        given = {"prompt": "a cat", name: prompt}
        told = refusal(pipe, guidance_scale=2.0, **given, **LATENT)
        assert told.startswith(f"`{name}`")
        assert words.get(str(prompt), "must be text") in told
