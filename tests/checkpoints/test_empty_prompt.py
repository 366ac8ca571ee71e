"""The tokens of no text, against the text encoder and tokenizer that a pipeline would run itself."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from hddm.checkpoints.prompts import PipelineText
from hddm.utils.errors import HddmError
from tests.artefacts import edit_json
from tests.component_files import save_by_transformers

WORDS = {"!": 0, "a</w>": 1, "<|startoftext|>": 2, "<|endoftext|>": 3}


def _pipeline(folder: Path, former: bool = False) -> CLIPTextModel:
    """A pipeline's text encoder and tokenizer; with ``former`` under the names of older files.

    As in Stable Diffusion, the encoder's config has other numbers of begin and end than the tokenizer.
    """
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=6,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = CLIPTextModel(config).eval()
    model.save_pretrained(folder / "text_encoder")
    file = folder / "text_encoder" / "model.safetensors"
    weights = {name.removeprefix("text_model."): tensor for name, tensor in load_file(file).items()}
    prefix = "text_model." if former else ""
    save_file({prefix + name: tensor for name, tensor in weights.items()}, file)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(WORDS))
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 6}))
    return model


def _said_by_its_own_tools(folder: Path, model: CLIPTextModel) -> torch.Tensor:
    """What the pipeline itself makes of an empty prompt."""
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    length = min(tokenizer.model_max_length, 6)
    tokens = tokenizer("", padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    with torch.no_grad():
        encoded: torch.Tensor = model(tokens.input_ids).last_hidden_state[0]
    return encoded


def _check(folder: Path, expected: torch.Tensor) -> None:
    torch.testing.assert_close(PipelineText(folder).empty_prompt(), expected, rtol=0, atol=1e-6)


def _refused(folder: Path, message: str) -> None:
    with pytest.raises(HddmError, match=message) as refused:
        PipelineText(folder).empty_prompt()
    assert "\n" not in str(refused.value)


_END = {
    "content": "<|endoftext|>",
    "lstrip": False,
    "normalized": True,
    "rstrip": False,
    "single_word": False,
}
_LISTED = {"0": {**_END, "content": "!", "normalized": False, "special": True}}


@pytest.mark.parametrize("former", [False, True], ids=["names of today", "former names"])
@pytest.mark.parametrize(
    ("config", "special"),
    [
        ({}, None),
        ({}, {}),
        ({"pad_token": "!"}, None),
        ({"pad_token": "<|endoftext|>"}, {"pad_token": "!"}),
        ({"pad_token": "!"}, {"pad_token": _END}),
        ({"pad_token": "!", "bos_token": {**_END, "__type": "AddedToken"}}, {"eos_token": {**_END}}),
        ({"bos_token": "a</w>", "eos_token": "!"}, {"bos_token": "!", "eos_token": "a</w>"}),
        ({"pad_token": "!", "added_tokens_decoder": _LISTED}, {"pad_token": "<|endoftext|>"}),
        ({"model_max_length": 4}, {"pad_token": "!"}),
        ({"model_max_length": 10**30}, None),
    ],
    ids=lambda value: str(value)[:50],
)
def test_no_text_is_what_tokenizer_and_encoder_of_the_pipeline_make_of_it(
    config: dict[str, object], special: dict[str, object] | None, former: bool, tmp_path: Path
) -> None:
    model = _pipeline(tmp_path, former)
    edit_json(tmp_path / "tokenizer" / "tokenizer_config.json", **config)
    if special is not None:
        (tmp_path / "tokenizer" / "special_tokens_map.json").write_text(json.dumps(special))
    _check(tmp_path, _said_by_its_own_tools(tmp_path, model))


@pytest.mark.parametrize(
    "config",
    [{}, {"pad_token": "!"}, {"bos_token": "a</w>", "eos_token": "!"}, {"model_max_length": 4}],
    ids=str,
)
@pytest.mark.parametrize("is_beside", [False, True])
def test_no_text_is_read_from_what_transformers_saves(
    config: dict[str, object], is_beside: bool, tmp_path: Path
) -> None:
    model, folder = _pipeline(tmp_path), tmp_path / "tokenizer"
    edit_json(folder / "tokenizer_config.json", **config)
    expected = _said_by_its_own_tools(tmp_path, model)
    save_by_transformers(folder)
    if is_beside:
        # The loader does not read it either.
        (folder / "vocab.json").write_text(json.dumps({word: 3 - i for word, i in WORDS.items()}))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    assert torch.equal(_said_by_its_own_tools(tmp_path, model), expected)
    _check(tmp_path, expected)


def test_an_added_token_has_the_number_that_the_tokenizer_gives_it(tmp_path: Path) -> None:
    model, folder = _pipeline(tmp_path), tmp_path / "tokenizer"
    words = {"!": 0, "a</w>": 1, "<|startoftext|>": 2}
    (folder / "vocab.json").write_text(json.dumps(words))
    save_by_transformers(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    assert "<|endoftext|>" not in stored["model"]["vocab"]
    assert torch.allclose(
        PipelineText(tmp_path).empty_prompt(), _said_by_its_own_tools(tmp_path, model), atol=1e-6
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"model": {"vocab": ["!"]}},
        {"added_tokens": 3, "model": {}},
        {"added_tokens": [3, {"content": ["x"]}, {"content": "<|startoftext|>"}], "model": {"vocab": {}}},
    ],
    ids=str,
)
def test_a_file_of_transformers_without_the_token_is_refused_by_its_name(
    change: dict[str, object], tmp_path: Path
) -> None:
    _pipeline(tmp_path)
    save_by_transformers(tmp_path / "tokenizer")
    edit_json(tmp_path / "tokenizer" / "tokenizer.json", **{"added_tokens": [], **change})
    _refused(tmp_path, r"has no number below 4 in tokenizer\.json")


@pytest.mark.parametrize(
    ("config", "words"),
    [({"pad_token": "[PAD]"}, WORDS), ({"pad_token": None}, WORDS), ({"pad_token": ["!"]}, WORDS)]
    + [({}, {**WORDS, "<|endoftext|>": odd}) for odd in (4, -1, "3", None, 10**400)],
    ids=lambda value: str(value)[-30:],
)
def test_a_token_that_the_encoder_lacks_is_refused(
    config: dict[str, object], words: dict[str, object], tmp_path: Path
) -> None:
    _pipeline(tmp_path)
    edit_json(tmp_path / "tokenizer" / "tokenizer_config.json", **config)
    (tmp_path / "tokenizer" / "vocab.json").write_text(json.dumps(words))
    _refused(tmp_path, r"tokenizer: (eos|pad)_token .* has no number below 4")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("text_encoder", "there is no text_encoder/config.json beside"),
        ("text_encoder/model.safetensors", "there is no text_encoder/model.safetensors beside"),
        ("tokenizer", "there is no tokenizer/tokenizer_config.json beside"),
        ("tokenizer/vocab.json", "there is neither tokenizer/tokenizer.json nor tokenizer/vocab.json beside"),
        (None, "the one beside is ['T5EncoderModel'], not a CLIPTextModel"),
    ],
)
def test_text_that_is_not_one_clip_encoders_is_not_read(
    name: str | None, reason: str, tmp_path: Path
) -> None:
    _pipeline(tmp_path)
    if name is None:
        edit_json(tmp_path / "text_encoder" / "config.json", architectures=["T5EncoderModel"])
    else:
        (tmp_path / name).rename(tmp_path / "elsewhere")
    text = PipelineText(tmp_path)
    assert (text.missing(), text.record(), text.empty_prompt()) == (reason, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"hidden_size": 32}, "does not fit its config.json"),
        ({"hidden_act": "os.system"}, "no text encoder can be built from it"),
        ({"vocab_size": 2}, "does not fit its config.json"),
        ({"vocab_size": "a"}, "no text encoder can be built from it"),
    ],
    ids=str,
)
def test_an_encoder_that_cannot_be_trusted_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    _pipeline(tmp_path)
    edit_json(tmp_path / "text_encoder" / "config.json", **change)
    _refused(tmp_path, message)
