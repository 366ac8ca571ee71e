"""Prompts longer than CLIP reads at once, and layers of it that are left out."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from hddm.networks.clip_reading import PromptReading
from hddm.networks.prompts import read_texts
from hddm.networks.text_encoder import embed, read_text_encoder
from hddm.networks.tokenizer import read_tokenizer
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.utils.errors import HddmError
from tests.artefacts import Command
from tests.checkpoint_files import converted
from tests.component_files import write_clip, write_t5
from tests.ldm_files import tiny_pipeline

TEXT = "encoder_hidden_states"
# A word of three letters is three tokens, and "cat" and "dog" are one each.
LONG = " ".join(["cat dog", *["red"] * 30, "dog"])


@pytest.fixture(scope="module", params=["1", "XL"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pipe(kind: str, tmp_path_factory: pytest.TempPathFactory) -> HDDMPipeline:
    folder = tmp_path_factory.mktemp(kind)
    tiny_pipeline(folder, kind, text_layers=3)
    from hddm import convert

    convert(folder / "pipeline", folder / "expert")
    return HDDMPipeline.from_pretrained(folder / "expert")


def test_each_chunk_is_read_as_a_prompt_of_its_own(pipe: HDDMPipeline) -> None:
    """75 tokens are "cat dog" and 24 words of three: no word is divided."""
    first, second = " ".join(["cat dog", *["red"] * 24]), " ".join([*["red"] * 6, "dog"])
    found = pipe.encode([LONG, "cat"], negative_prompt="dog", guided=True, long_prompt=True)
    parts = pipe.encode([first, second, "cat", ""])
    expected = parts.given[TEXT]
    assert found.given[TEXT].shape[1] == 2 * 77
    torch.testing.assert_close(found.given[TEXT][0], torch.cat([expected[0], expected[1]]))
    torch.testing.assert_close(found.given[TEXT][1], torch.cat([expected[2], expected[3]]))
    dog = pipe.encode(["dog", ""]).given[TEXT]
    torch.testing.assert_close(found.negative[TEXT][0], torch.cat([dog[0], dog[1]]))
    if "text_embeds" in found.given:
        # The vector is that of the first chunk.
        vectors = parts.given["text_embeds"][[0, 2]]
        torch.testing.assert_close(found.given["text_embeds"], vectors)


def test_prompts_that_fit_are_read_as_ever(pipe: HDDMPipeline) -> None:
    plain, long = pipe.encode(["cat", "dog"]), pipe.encode(["cat", "dog"], long_prompt=True)
    for name, value in plain.given.items():
        assert torch.equal(long.given[name], value)


def test_a_layer_that_is_left_out_is_that_of_diffusers(
    kind: str, tmp_path: Path, pipe: HDDMPipeline
) -> None:
    stock = tiny_pipeline(tmp_path, kind, text_layers=3)
    found = pipe.encode(["cat"], clip_skip=1).given
    if kind == "XL":
        tokens, _, pooled, _ = stock.encode_prompt(
            "cat", clip_skip=1, do_classifier_free_guidance=False
        )
        torch.testing.assert_close(found["text_embeds"], pooled)
    else:
        # Diffusers' own argument fails with this version of transformers; this is what it says.
        ids = stock.tokenizer("cat", padding="max_length", max_length=77, return_tensors="pt")
        with torch.no_grad():
            states = stock.text_encoder(ids.input_ids, output_hidden_states=True).hidden_states
        tokens = stock.text_encoder.final_layer_norm(states[-2])
    torch.testing.assert_close(found[TEXT], tokens)
    assert not torch.allclose(found[TEXT], pipe.encode(["cat"]).given[TEXT])
    with pytest.raises(HddmError, match="`clip_skip` 5: a text encoder has 3 layers; pass at most"):
        pipe.encode(["cat"], clip_skip=5)


def test_without_skipping_the_last_layer_is_read_with_its_norm(tmp_path: Path) -> None:
    write_clip(tmp_path)
    encoder = read_text_encoder(tmp_path / "text_encoder")
    words = read_tokenizer(tmp_path / "tokenizer")
    plain = embed(encoder, words, ["cat", "dog"])
    # Two chunks, of which the second is empty.
    chunked = embed(encoder, words, ["cat", "dog"], reading=PromptReading(True, chunks=2))
    torch.testing.assert_close(chunked.tokens[:, :77], plain.tokens)
    torch.testing.assert_close(chunked.pooled, plain.pooled)


def test_a_word_longer_than_a_chunk_is_divided_at_its_end(tmp_path: Path) -> None:
    write_clip(tmp_path)
    encoder = read_text_encoder(tmp_path / "text_encoder")
    words = read_tokenizer(tmp_path / "tokenizer")
    reading = PromptReading(True).of_all(encoder, words, ["x" * 151])
    assert reading.chunks == 3
    found = embed(encoder, words, ["x" * 151], reading=reading)
    assert found.tokens.shape == (1, 3 * 77, 16)


def test_t5_takes_neither(tmp_path: Path) -> None:
    encoder = write_t5(tmp_path, 16)
    words = read_tokenizer(tmp_path / "tokenizer")
    for reading, name in (
        (PromptReading(clip_skip=1), "clip_skip"),
        (PromptReading(True, chunks=2), "long_prompt"),
    ):
        with pytest.raises(HddmError, match=f"`{name}`: is for networks of CLIP alone"):
            embed(encoder, words, ["cat"], reading=reading)
    assert read_texts(tmp_path / "text_encoder").config.num_layers > 0


@pytest.mark.integration
def test_the_command_reads_long_prompts_and_says_so_in_its_files(
    hddm: Command, tmp_path: Path
) -> None:
    tiny_pipeline(tmp_path, "1")
    expert, sizes = tmp_path / "expert", ("--num-images", 2, "--steps", 2, "--guidance-scale", 3)
    converted(hddm, tmp_path / "pipeline", expert)
    made = {}
    for name, options in (
        ("cut", ()),
        ("long", ("--long-prompt",)),
        ("both", ("--long-prompt", "--clip-skip", 1)),
    ):
        out = tmp_path / name
        code, _, error = hddm("sample", expert, "--out", out, "--prompt", LONG, *sizes, *options)
        assert code == 0, error
        assert ("is cut to 77" in error) == (name == "cut")
        made[name] = Image.open(out / "00000.png")
    assert made["cut"].tobytes() != made["long"].tobytes() != made["both"].tobytes()
    assert "Clip skip: 2" in made["both"].text["parameters"]
    assert "Clip skip" not in made["long"].text["parameters"]
    record = json.loads((tmp_path / "both/sampling.json").read_text())
    assert (record["long_prompt"], record["clip_skip"]) == (True, 1)
    code, _, error = hddm(
        "sample", expert, "--out", tmp_path / "none", "--clip-skip", 1, *sizes[:4]
    )
    assert code == 2
    assert "--clip-skip: says how a --prompt is read, and none is; drop the option" in error
