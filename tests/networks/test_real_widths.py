"""Networks of published widths: their sizes without memory, and a few blocks of them with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline, ModelMixin
from torch import Tensor

import hddm as library
from benchmarks.commands import used_by
from benchmarks.full_size import HDDM
from hddm.networks.families import families
from hddm.networks.folders import empty_network
from tests.component_files import write_vae

MEMORY = 900e6
"""Bytes that a conversion may hold without a file behind them; Python and its packages hold 400e6 of them."""


@dataclass(frozen=True)
class Published:
    """The published config of a network, its number of weights, and a pipeline around a few of its blocks."""

    config: Mapping[str, Any]
    weights: float
    few: Mapping[str, int]
    pipeline: type[DiffusionPipeline]
    scheduler: Any
    texts: Mapping[str, tuple[int, int]]
    """Number and width of the tokens of a prompt, by their keyword."""
    empty: tuple[str, ...]
    more: Mapping[str, Any]
    asked: Mapping[str, Any]
    """Arguments of a call beside texts, size and steps."""
    options: tuple[str, ...] = ()


CHROMA = Published(
    {
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "axes_dims_rope": (16, 56, 56),
        "approximator_num_channels": 64,
        "approximator_hidden_dim": 5120,
        "approximator_layers": 5,
    },
    weights=8.9e9,
    few={"num_layers": 1, "num_single_layers": 1},
    pipeline=diffusers.ChromaPipeline,
    scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    texts={"prompt_embeds": (40, 4096)},
    empty=("text_encoder", "tokenizer"),
    more={},
    asked={},
    options=("--sample-size", "32"),
)
HUNYUAN = Published(
    {
        "num_attention_heads": 16,
        "attention_head_dim": 88,
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": 128,
        "hidden_size": 1408,
        "num_layers": 40,
        "mlp_ratio": 4.3637,
        "learn_sigma": True,
        "cross_attention_dim": 1024,
        "cross_attention_dim_t5": 2048,
        "pooled_projection_dim": 1024,
        "use_style_cond_and_image_meta_size": False,
    },
    weights=1.5e9,
    few={"num_layers": 14},
    pipeline=diffusers.HunyuanDiTPipeline,
    scheduler=diffusers.DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.018,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        steps_offset=1,
    ),
    texts={"prompt_embeds": (77, 1024), "prompt_embeds_2": (256, 2048)},
    empty=(
        "text_encoder",
        "tokenizer",
        "text_encoder_2",
        "tokenizer_2",
        "safety_checker",
        "feature_extractor",
    ),
    more={"requires_safety_checker": False},
    # It would make pictures of 1024 pixels otherwise.
    asked={"use_resolution_binning": False},
)
PUBLISHED = {"ChromaTransformer2DModel": CHROMA, "HunyuanDiT2DModel": HUNYUAN}


@dataclass(frozen=True)
class Size:
    """A published config, with its number of weights and of patches of a sample of side 128."""

    config: Mapping[str, Any]
    weights: float
    patches: int | None = 4096


SIZES = {name: Size(one.config, one.weights) for name, one in PUBLISHED.items()} | {
    "FluxTransformer2DModel": Size({"guidance_embeds": True}, 11.9e9),
    "SD3Transformer2DModel": Size(
        {
            "num_layers": 24,
            "attention_head_dim": 64,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "out_channels": 16,
            "pos_embed_max_size": 192,
        },
        2.03e9,
    ),
    "ZImageTransformer2DModel": Size(
        {
            "in_channels": 16,
            "dim": 3840,
            "n_layers": 30,
            "n_refiner_layers": 2,
            "n_heads": 30,
            "n_kv_heads": 30,
            "cap_feat_dim": 2560,
            "axes_dims": [32, 48, 48],
            "axes_lens": [1536, 512, 512],
        },
        6.15e9,
    ),
    "Lumina2Transformer2DModel": Size(
        {
            "in_channels": 16,
            "hidden_size": 2304,
            "num_layers": 26,
            "num_refiner_layers": 2,
            "num_attention_heads": 24,
            "num_kv_heads": 8,
            "cap_feat_dim": 2304,
            "axes_dim_rope": [32, 32, 32],
            "axes_lens": [300, 512, 512],
        },
        2.61e9,
    ),
    # Of Kolors.
    "UNet2DConditionModel": Size(
        {
            "sample_size": 128,
            "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * 2],
            "up_block_types": [*["CrossAttnUpBlock2D"] * 2, "UpBlock2D"],
            "block_out_channels": [320, 640, 1280],
            "transformer_layers_per_block": [1, 2, 10],
            "attention_head_dim": [5, 10, 20],
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 5632,
            "encoder_hid_dim": 4096,
            "encoder_hid_dim_type": "text_proj",
        },
        2.58e9,
        patches=None,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_published_network_has_its_weights_and_its_patches(name: str) -> None:
    published = SIZES[name]
    kind = getattr(diffusers, name)
    network = empty_network(kind, dict(published.config), 3000, "config.json")
    weights = sum(one.numel() for one in network.parameters())
    assert weights == pytest.approx(published.weights, rel=0.03)
    assert families()[name].interface(network.config, (128, 128)).num_patches == published.patches


def test_every_family_that_is_published_as_a_single_file_is_among_them() -> None:
    assert {one.name for one in families().values() if one.single_file} <= set(SIZES)


def _stock(name: str, folder: Path) -> DiffusionPipeline:
    """The pipeline around a few blocks of full width, of random weights in bfloat16, none of them zero."""
    published = PUBLISHED[name]
    network: ModelMixin = getattr(diffusers, name)(**{**published.config, **published.few})
    noise = torch.Generator().manual_seed(0)
    for key, one in network.named_parameters():
        mean = 1.0 if "norm" in key and one.ndim == 1 else 0.0
        one.data.normal_(mean=mean, std=0.02, generator=noise)
    parts = {"transformer": network.bfloat16().eval(), "scheduler": published.scheduler}
    empty = dict.fromkeys(published.empty)
    vae = write_vae(folder / "vae", factor=8, shift_factor=0.0)
    pipe = published.pipeline(**parts, **empty, vae=vae, **published.more)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _texts(name: str) -> dict[str, Tensor]:
    """Tokens of a prompt and a negative prompt, and their masks, in the widths of the text encoders."""
    made = {}
    for seed, (text, shape) in enumerate(PUBLISHED[name].texts.items()):
        mask = text.replace("prompt_embeds", "prompt_attention_mask")
        for sign, length in (("", 12), ("negative_", 3)):
            noise = torch.Generator().manual_seed(10 * seed + len(sign))
            made[f"{sign}{text}"] = torch.randn(1, *shape, generator=noise)
            made[f"{sign}{mask}"] = (torch.arange(shape[0]) < length).float()[None]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_blocks_of_full_width_are_converted_in_little_memory_and_make_the_pipelines_latents(
    name: str, tmp_path: Path
) -> None:
    """The conversion maps weights, so that it holds no second copy of them."""
    pipe = _stock(name, tmp_path)
    pipe.save_pretrained(tmp_path / "source", max_shard_size="200MB")
    expert = tmp_path / "expert"
    options = PUBLISHED[name].options
    used = used_by(HDDM, "convert", tmp_path / "source", "--out", expert, *options)
    size = sum(one.numel() for one in pipe.transformer.parameters()) * 2
    assert 0 < used.anonymous < MEMORY < size

    # Read anew: what a network computes when it is made was rounded to bfloat16 above.
    kind, saved = type(pipe.transformer), tmp_path / "source" / "transformer"
    pipe.transformer = kind.from_pretrained(saved, torch_dtype=torch.float32)

    def latents() -> Tensor:
        made: Tensor = pipe(
            **_texts(name),
            **PUBLISHED[name].asked,
            height=256,
            width=256,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(3),
            output_type="latent",
        ).images
        return made

    theirs = latents()
    pipe.transformer = library.drop_in(library.load(expert, dtype=torch.float32), pipe)
    assert (latents() - theirs).abs().max() < 5e-5 * theirs.abs().max()
