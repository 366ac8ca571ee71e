"""Prompts as tokens, against transformers' own encoder and tokenizer on the same files."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.utils import logging as transformers_logging

from hddm.networks.components import read_config
from hddm.networks.prompts import PipelineText
from hddm.networks.text_encoder import embed, read_text_encoder, text_encoder_record_of
from hddm.networks.tokenizer import read_tokenizer
from tests.artefacts import edit_json, refusal
from tests.component_files import write_clip, write_t5, write_tokenizer

PROMPTS = ["a cat", "", "A dog, 2 cats & ünïcödé  spaces", "cat " * 3]
FILE = "text_encoder/model.safetensors"
TEMPLATE = "tokenizer/additional_chat_templates/a.jinja"


def _ours(root: Path, prompts: list[str] = PROMPTS) -> torch.Tensor:
    return embed(
        read_text_encoder(root / "text_encoder"), read_tokenizer(root / "tokenizer"), prompts
    ).tokens


def _theirs(root: Path, length: int = 77, prompts: list[str] = PROMPTS) -> torch.Tensor:
    tokenizer = CLIPTokenizer.from_pretrained(root / "tokenizer")
    model = CLIPTextModel.from_pretrained(root / "text_encoder").eval()
    tokens = tokenizer(
        prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        encoded: torch.Tensor = model(tokens.input_ids).last_hidden_state
    return encoded


def _rename(root: Path, prefix: str) -> None:
    weights = load_file(root / FILE)
    renamed = {prefix + key.removeprefix("text_model."): value for key, value in weights.items()}
    save_file(renamed, root / FILE)


@pytest.mark.parametrize(("width", "prefix"), [(16, ""), (768, "text_model.")])
def test_prompts_become_what_transformers_makes_of_them(
    width: int, prefix: str, tmp_path: Path
) -> None:
    write_clip(tmp_path, width)
    _rename(tmp_path, prefix)
    encoded = _ours(tmp_path)
    assert encoded.shape == (4, 77, width)
    assert (encoded - _theirs(tmp_path)).abs().max() < 1e-6
    assert (encoded[0] - encoded[2]).abs().max() > 0.1
    assert torch.allclose(
        encoded[PROMPTS.index("")], PipelineText(tmp_path).empty_prompt(), atol=1e-6
    )


@pytest.mark.parametrize(("limit", "length"), [(8, 8), (10**30, 12), (12, 12), (77, 12)])
def test_prompts_are_padded_within_tokenizer_and_positions(
    limit: int, length: int, tmp_path: Path
) -> None:
    write_clip(tmp_path, tokens=12)
    edit_json(tmp_path / "tokenizer" / "tokenizer_config.json", model_max_length=limit)
    encoded = _ours(tmp_path, ["a cat"])
    assert encoded.shape == (1, length, 16)
    assert (encoded - _theirs(tmp_path, length, ["a cat"])).abs().max() < 1e-6


def test_a_prompt_that_is_cut_is_said_to_be_with_what_is_lost(tmp_path: Path) -> None:
    write_clip(tmp_path, tokens=6)
    with pytest.warns(
        UserWarning, match=r"8 tokens is cut to 6: 'cat dog cat cat dog cat' … loses 'dog cat'"
    ):
        encoded = _ours(tmp_path, ["cat", "cat dog cat cat dog cat"])
    assert (encoded - _theirs(tmp_path, 6, ["cat", "cat dog cat cat dog cat"])).abs().max() < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _ours(tmp_path, ["cat dog cat dog"])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"bos_token_id": 516, "eos_token_id": 517},
        {"bos_token_id": -1, "eos_token_id": None, "pad_token_id": None},
        {"eos_token_id": True, "pad_token_id": [517, "x"]},
        {"_attn_implementation_internal": "foreign/kernel"},
    ],
    ids=str,
)
def test_special_tokens_and_a_choice_of_attention_change_no_hidden_state_and_warn_of_nothing(
    change: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_clip(tmp_path)
    expected, size = _theirs(tmp_path), read_config(tmp_path / "text_encoder")["vocab_size"]
    edit_json(tmp_path / "text_encoder" / "config.json", **change)
    capfd.readouterr()
    # A message that was logged once is not logged again.
    transformers_logging.get_logger("transformers.configuration_utils").warning_once.cache_clear()
    encoder = read_text_encoder(tmp_path / "text_encoder")
    assert capfd.readouterr() == ("", "")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(encoder.config, name) in (None, *range(size))
    found = embed(encoder, read_tokenizer(tmp_path / "tokenizer"), PROMPTS).tokens
    assert (found - expected).abs().max() < 1e-6


def test_a_projection_is_left_aside(tmp_path: Path) -> None:
    plain = write_clip(tmp_path)
    model = CLIPTextModelWithProjection(plain.config)
    expected, facts = _ours(tmp_path), text_encoder_record_of(tmp_path / "text_encoder", 77)
    inner = {key.removeprefix("text_model."): value for key, value in plain.state_dict().items()}
    for key, value in model.state_dict().items():
        if key.removeprefix("text_model.") in inner:
            value.copy_(inner[key.removeprefix("text_model.")])
    model.save_pretrained(tmp_path / "text_encoder")
    assert "text_projection.weight" in load_file(tmp_path / FILE)
    assert torch.equal(_ours(tmp_path), expected)
    assert text_encoder_record_of(tmp_path / "text_encoder", 77) == facts


def test_a_float16_copy_is_the_same_encoder_and_another_is_another(tmp_path: Path) -> None:
    write_clip(tmp_path / "full")
    write_clip(tmp_path / "half", dtype=torch.float16)
    write_clip(tmp_path / "other", seed=1)
    facts = [
        text_encoder_record_of(tmp_path / name / "text_encoder", 77)
        for name in ("full", "half", "other")
    ]
    assert facts[0] == facts[1]
    assert facts[0].fingerprint != facts[2].fingerprint
    assert (facts[0].kind, facts[0].tokens, facts[0].width) == ("CLIPTextModel", 77, 16)
    half = _ours(tmp_path / "half")
    assert half.dtype == torch.float32
    assert (half - _ours(tmp_path / "full")).abs().max() < 0.05
    encoder = read_text_encoder(tmp_path / "full" / "text_encoder", torch.bfloat16)
    encoded = embed(encoder, read_tokenizer(tmp_path / "full" / "tokenizer"), PROMPTS).tokens
    assert (encoded.dtype, encoded.requires_grad, encoder.training) == (
        torch.bfloat16,
        False,
        False,
    )


def test_a_tokenizer_of_another_encoder_is_refused(tmp_path: Path) -> None:
    write_clip(tmp_path, vocab_size=100)
    assert "and the text encoder has 100; use the tokenizer that belongs" in refusal(
        _ours, tmp_path
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, "'auto_map', which names code of its own"),
        (
            {"architectures": ["BertModel"]},
            "holds ['BertModel'], not a CLIPTextModel or a T5EncoderModel",
        ),
        ({"architectures": None}, "names no class (architectures), not a CLIPTextModel"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        (
            {"num_attention_heads": -2},
            "no text encoder can be built from it (num_attention_heads is -2)",
        ),
        ({"hidden_act": "os.system"}, "no text encoder can be built from it"),
        ({"hidden_size": 32}, "does not fit its config.json"),
        # A buffer of eighty gigabytes, if it were built before it is compared.
        (
            {"max_position_embeddings": 10**10},
            "embeddings.position_embedding.weight is (77, 16), not (1000000",
        ),
        ({"vocab_size": "x"}, "no text encoder can be built from it"),
    ],
    ids=str,
)
def test_an_encoder_that_cannot_be_trusted_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_clip(tmp_path)
    edit_json(tmp_path / "text_encoder" / "config.json", **change)
    for read in (read_text_encoder, lambda folder: text_encoder_record_of(folder, 77)):
        assert message in refusal(read, tmp_path / "text_encoder")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"auto_map": {"AutoTokenizer": ["x.Y", None]}}, "'auto_map', which names code of its own"),
        (
            {"tokenizer_class": "GPT2Tokenizer"},
            "holds a GPT2Tokenizer, not a CLIPTokenizer or a T5Tokenizer or a BertTokenizer",
        ),
        ({"tokenizer_class": None}, "names no class (tokenizer_class), of a CLIPTokenizer or"),
        ({"vocab_file": "/etc/passwd"}, "has an unknown key 'vocab_file'"),
        ({"init_inputs": ["/etc/passwd"]}, "has an unknown key 'init_inputs'"),
        ({"fast_tokenizer_files": ["../x.json"]}, "has an unknown key 'fast_tokenizer_files'"),
        ({"model_max_lenght": 77}, "did you mean 'model_max_length'"),
        ({"model_max_length": "x"}, "its files do not make a tokenizer"),
        (
            {"model_input_names": ["x"]},
            "model_input_names is ['x'], without attention_mask; delete it",
        ),
        (
            {"additional_special_tokens": [f"<{n}>" for n in range(20_000)]},
            "adds 20,000 tokens to its voc",
        ),
        (
            {"added_tokens_decoder": {str(n): {} for n in range(1001)}},
            "adds 1,001 tokens to its vocabulary",
        ),
        ({"extra_ids": 10**9}, "tokens to its vocabulary, of 1,000 at most; delete those"),
        (
            {"extra_ids": -20_000, "additional_special_tokens": [f"<{n}>" for n in range(20_000)]},
            "extra_ids of its tokenizer_config.json is -20000; set 0 or more there",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_tokenizer_that_names_code_or_files_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    edit_json(tmp_path / "tokenizer" / "tokenizer_config.json", **change)
    assert message in refusal(read_tokenizer, tmp_path / "tokenizer")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("special_tokens_map.json", {"additional_special_tokens": [f"<{n}>" for n in range(1001)]}),
        ("added_tokens.json", {f"<{n}>": 600 + n for n in range(1001)}),
        ("tokenizer.json", {"added_tokens": [{"content": f"<{n}>"} for n in range(1001)]}),
    ],
    ids=["map", "added", "tokenizer"],
)
def test_very_many_added_tokens_are_refused_in_every_file(
    name: str, content: dict[str, Any], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / name).write_text(json.dumps(content))
    assert "adds 1,001 tokens to its vocabulary" in refusal(read_tokenizer, tmp_path / "tokenizer")


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "tokenizer_config.json"])
def test_a_broken_or_missing_file_of_a_tokenizer_is_named(name: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    folder = tmp_path / "tokenizer"
    (folder / name).write_text("[")
    if name != "merges.txt":
        said = refusal(read_tokenizer, folder)
        assert "do not make a tokenizer" in said or "cannot be read as JSON" in said
    (folder / name).unlink()
    assert name in refusal(read_tokenizer, folder)


@pytest.mark.parametrize(
    "name",
    [
        "text_encoder/config.json",
        FILE,
        "tokenizer/vocab.json",
        "tokenizer/tokenizer_config.json",
        TEMPLATE,
    ],
)
def test_a_link_that_leaves_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    write_clip(tmp_path / "pipeline")
    path = tmp_path / "pipeline" / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert "outside the folder" in refusal(_ours, tmp_path / "pipeline")


def test_t5_masks_its_padding_and_is_the_one_of_transformers(tmp_path: Path) -> None:
    model = write_t5(tmp_path)
    encoder, tokenizer = (
        read_text_encoder(tmp_path / "text_encoder"),
        read_tokenizer(tmp_path / "tokenizer"),
    )
    found = embed(encoder, tokenizer, ["a cat", "a dog and a cat"])
    own = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    given = own(
        ["a cat", "a dog and a cat"], padding="max_length", max_length=300, return_tensors="pt"
    )
    expected = model(given.input_ids, attention_mask=given.attention_mask)[0]
    assert torch.equal(found.tokens, expected)
    assert torch.equal(found.conditions["encoder_attention_mask"], given.attention_mask)
    alone = own(["a cat"], return_tensors="pt")
    torch.testing.assert_close(found.pooled[0], model(**alone)[0][0].mean(0))
    record = text_encoder_record_of(tmp_path / "text_encoder", tokenizer.model_max_length)
    assert (record.kind, record.tokens, record.width) == ("T5EncoderModel", 300, 16)


def test_clip_pools_at_the_end_of_the_text(tmp_path: Path) -> None:
    model = write_clip(tmp_path)
    encoder, tokenizer = (
        read_text_encoder(tmp_path / "text_encoder"),
        read_tokenizer(tmp_path / "tokenizer"),
    )
    pooled = embed(encoder, tokenizer, ["a cat", "do"]).pooled
    for text, found in zip(["a cat", "do"], pooled, strict=True):
        ids = tokenizer([text], return_tensors="pt").input_ids
        torch.testing.assert_close(found, model(ids).last_hidden_state[0, -1])
