"""Tiny VAEs, text encoders and tokenizers, written by the tools whose layout they have."""

import json
import string
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny, DiffusionPipeline
from diffusers.pipelines.kolors import ChatGLMModel, ChatGLMTokenizer
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from tests.artefacts import edit_json
from tests.checkpoint_files import randomised

BEGIN, END = "<|startoftext|>", "<|endoftext|>"


def write_vae(
    folder: Path,
    kind: Literal["kl", "tiny"] = "kl",
    latent_channels: int = 4,
    factor: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> AutoencoderKL | AutoencoderTiny:
    """Write and return a VAE whose images are ``factor`` (a power of two) times as wide as its latents."""
    widths, ones = (8,) * factor.bit_length(), (1,) * factor.bit_length()
    sizes: dict[str, Any] = {"latent_channels": latent_channels}
    if kind == "kl":
        sizes |= {"block_out_channels": widths, "norm_num_groups": 2}
        for part, block in (("down", "DownEncoderBlock2D"), ("up", "UpDecoderBlock2D")):
            sizes[f"{part}_block_types"] = (block,) * len(widths)
        vae = AutoencoderKL(**sizes | changes)
    else:
        for part in ("encoder", "decoder"):
            sizes |= {f"{part}_block_out_channels": widths, f"num_{part}_blocks": ones}
        vae = AutoencoderTiny(**sizes | changes)
    randomised(vae, seed).to(dtype).save_pretrained(folder)
    return vae


def write_clip(
    root: Path,
    width: int = 16,
    tokens: int = 77,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> CLIPTextModel:
    """Write ``root/text_encoder``, which is returned, and ``root/tokenizer``, for any lower-case text."""
    words = write_tokenizer(root / "tokenizer", tokens)
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": tokens,
    }
    model = CLIPTextModel(CLIPTextConfig(**sizes | changes))
    _scatter(model)
    model.to(dtype).save_pretrained(root / "text_encoder")
    return model


def texts_in(root: Path) -> dict[str, Path]:
    """What `write_clip` writes, by name."""
    return {name: root / name for name in ("text_encoder", "tokenizer")}


def _scatter(model: PreTrainedModel) -> None:
    model.eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data = 0.3 * torch.randn(parameter.shape)


def write_t5(root: Path, width: int = 16, seed: int = 0) -> T5EncoderModel:
    """Write ``root/text_encoder``, which is returned, and ``root/tokenizer``, for any lower-case text."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -1.0),
        ("▁cat", -1.5),
        ("▁dog", -1.5),
    ]
    tokenizer = T5Tokenizer(vocab=[*pieces, *((letter, -2.0) for letter in letters)], extra_ids=0)
    tokenizer.save_pretrained(root / "tokenizer")
    torch.manual_seed(seed)
    config = T5Config(vocab_size=40, d_model=width, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    model = T5EncoderModel(config)
    _scatter(model)
    model.save_pretrained(root / "text_encoder")
    return model


def write_bert(root: Path, width: int = 16, seed: int = 0) -> BertModel:
    """Write ``root/text_encoder``, which is returned, and ``root/tokenizer``, for texts of letters."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "dog", *letters]
    words += [f"##{letter}" for letter in letters]
    vocabulary = {word: number for number, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary, model_max_length=77).save_pretrained(root / "tokenizer")
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), num_hidden_layers=2, **sizes)
    model = BertModel(config)
    _scatter(model)
    model.save_pretrained(root / "text_encoder")
    return model


def write_chatglm(root: Path, width: int = 16, seed: int = 0) -> ChatGLMModel:
    """Write ``root/text_encoder``, which is returned, and ``root/tokenizer``, with configs as published."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = root / "tokenizer"
    folder.mkdir(parents=True)
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(
                ["a cat on a lawn", "two dogs", "the quick brown fox jumps"] * 9
            ),
            model_writer=file,
            vocab_size=40,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    ChatGLMTokenizer(str(folder / "tokenizer.model")).save_pretrained(folder)
    marks = {"eos_token": "</s>", "pad_token": "<unk>", "unk_token": "<unk>"}
    edit_json(folder / "tokenizer_config.json", do_lower_case=False, **marks)
    torch.manual_seed(seed)
    config = ChatGLMConfig(
        num_layers=2,
        padded_vocab_size=64,
        hidden_size=width,
        ffn_hidden_size=24,
        kv_channels=8,
        num_attention_heads=4,
        seq_length=300,
        multi_query_attention=True,
        multi_query_group_num=2,
        add_qkv_bias=True,
        original_rope=True,
    )
    model = ChatGLMModel(config, empty_init=False)
    _scatter(model)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            # The class leaves them as they lie in memory.
            parameter.data = 1 + 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(root / "text_encoder")
    return model


TURNS = """{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set text = message.content %}
    {%- else %}
        {%- set text = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- set seen.turns = loop.index %}
    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
"""A chat template that writes a prompt as that of Qwen3 does, with tools and thinking as there."""


def write_qwen3(root: Path, width: int = 16, seed: int = 0) -> Qwen3Model:
    """Write ``root/text_encoder``, whose model is returned, and ``root/tokenizer``, as Z-Image has them.

    The text encoder is stored with what makes words of its states, and the vocabulary without tokenizer.json.
    """
    letters, marks = _letters(), ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    merges = ["c a", "ca t", "d o", "do g"]
    words = letters + [pair.replace(" ", "") for pair in merges]
    folder = root / "tokenizer"
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(merges) + "\n")
    added = {}
    for number, mark in enumerate(marks):
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        added[str(len(words) + number)] = {"content": mark, "special": True, **flags}
    stated = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": list(marks[1:]),
        "bos_token": None,
        "chat_template": TURNS,
        "eos_token": marks[2],
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": marks[0],
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    rope = {"rope_type": "default", "rope_theta": 1e5}
    config = Qwen3Config(vocab_size=len(words) + 3, rope_parameters=rope, **sizes, **heads)
    model = Qwen3ForCausalLM(config)
    _scatter(model)
    model.save_pretrained(root / "text_encoder")
    return model.model


def write_gemma2(root: Path, width: int = 16, seed: int = 0) -> Gemma2Model:
    """Write ``root/text_encoder``, whose model is returned, and ``root/tokenizer``, as Lumina 2 has them.

    The vocabulary is in tokenizer.json alone, beside a config with the keys of published ones.
    """
    marks = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    words = [*marks, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.ascii_letters]
    merges = [("c", "a"), ("ca", "t"), ("d", "o"), ("do", "g"), ("▁", "a")]
    words += ["".join(pair) for pair in merges]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = GemmaTokenizer(vocabulary, merges)
    begin = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.save_pretrained(root / "tokenizer")
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    added = {str(n): {"content": mark, "special": True, **flags} for n, mark in enumerate(marks)}
    stated = {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": added,
        "bos_token": "<bos>",
        "chat_template": "{{ raise_exception('evil') }}",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        "model_max_length": 10**30,
        "pad_token": "<pad>",
        "sp_model_kwargs": {},
        "spaces_between_special_tokens": False,
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
    }
    (root / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(stated))
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "query_pre_attn_scalar": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = Gemma2Config(vocab_size=len(words), rope_parameters=rope, **sizes, **heads)
    model = Gemma2Model(config)
    _scatter(model)
    model.save_pretrained(root / "text_encoder")
    return model


def _letters() -> list[str]:
    """The printable stand-in of each byte, as byte-level vocabularies have had it since GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def write_tokenizer(folder: Path, tokens: int = 77, **config: Any) -> int:
    """Write a byte-level vocabulary, with the four files of Stable Diffusion's; its size is returned."""
    letters = _letters()
    merges = ["c a", "ca t</w>", "d o", "do g</w>"]
    words = (
        letters
        + [letter + "</w>" for letter in letters]
        + [pair.replace(" ", "") for pair in merges]
    )
    words += [BEGIN, END]
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    special = {"bos_token": BEGIN, "eos_token": END, "unk_token": END, "pad_token": END}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    stated = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": tokens,
        "add_prefix_space": False,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(special | {"errors": "replace", "do_lower_case": True} | stated | config)
    )
    return len(words)


def save_by_transformers(folder: Path) -> None:
    """Replace a tokenizer's files by those that the installed transformers saves: no vocabulary by itself."""
    tokenizer = CLIPTokenizer.from_pretrained(folder)
    for path in folder.iterdir():
        path.unlink()
    tokenizer.save_pretrained(folder)
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def saved_in_parts(
    pipe: DiffusionPipeline, folder: Path, network: str = "transformer", **saving: Any
) -> Path:
    """A pipeline's folder whose network is in several files."""
    pipe.save_pretrained(folder, max_shard_size="40KB", **saving)
    assert list((folder / network).glob("diffusion_pytorch_model.safetensors.index.*json"))
    return folder
