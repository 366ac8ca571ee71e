"""The tokens of no text, against the text encoder and tokenizer that a pipeline would run itself."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from hddm.checkpoints.empty_prompt import empty_prompt
from hddm.errors import HddmError
from tests.artefacts import edit_json

WORDS = {"!": 0, "a</w>": 1, "<|startoftext|>": 2, "<|endoftext|>": 3}


def _pipeline(folder: Path, pad: str = "<|endoftext|>", former: bool = False) -> CLIPTextModel:
    """A pipeline's text encoder and tokenizer; with ``former`` under the names of older files."""
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=6,
        bos_token_id=2,
        eos_token_id=3,
    )
    model = CLIPTextModel(config).eval()
    model.save_pretrained(folder / "text_encoder")
    file = folder / "text_encoder" / "model.safetensors"
    weights = {name.removeprefix("text_model."): tensor for name, tensor in load_file(file).items()}
    prefix = "text_model." if former else ""
    save_file({prefix + name: tensor for name, tensor in weights.items()}, file)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps(WORDS))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))
    return model


@pytest.mark.parametrize("former", [False, True], ids=["names of today", "former names"])
@pytest.mark.parametrize(("pad", "number"), [("<|endoftext|>", 3), ("!", 0)])
def test_no_text_is_what_the_encoder_makes_of_begin_end_and_padding(
    pad: str, number: int, former: bool, tmp_path: Path
) -> None:
    model = _pipeline(tmp_path, pad, former)
    read = empty_prompt(tmp_path, None)
    assert read is not None
    with torch.no_grad():
        expected = model(torch.tensor([[2, 3, *[number] * 4]])).last_hidden_state[0]
    assert torch.allclose(read(), expected, atol=1e-6)


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer"])
def test_a_pipeline_without_its_text_part_has_no_tokens_for_no_text(part: str, tmp_path: Path) -> None:
    _pipeline(tmp_path)
    (tmp_path / part).rename(tmp_path / "elsewhere")
    assert empty_prompt(tmp_path, None) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"hidden_size": 32}, "does not fit its config.json"),
        ({"hidden_act": "os.system"}, "no text encoder can be built from it"),
        ({"vocab_size": 2}, "pad_token '<|endoftext|>' is not in vocab.json"),
    ],
    ids=str,
)
def test_an_encoder_that_cannot_be_trusted_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    _pipeline(tmp_path)
    edit_json(tmp_path / "text_encoder" / "config.json", **change)
    read = empty_prompt(tmp_path, None)
    assert read is not None
    with pytest.raises(HddmError) as refused:
        read()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
