"""Tiny checkpoints as real tools write them, and what their networks mean, written down by hand."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DiTTransformer2DModel,
    ModelMixin,
    PixArtTransformer2DModel,
    SchedulerMixin,
    UNet2DConditionModel,
    UNet2DModel,
)
from torch import Tensor

import hddm
from hddm.networks.families import family_of
from hddm.networks.transformers import ExpertTransformer
from tests.artefacts import Command, contents
from tests.hostile import grown_by
from tests.oracles import solved

SHARES = (0.05, 0.4, 0.7, 0.97)
"""Of an expert's range of noise levels."""
UNET = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16,
}
UNCONDITIONAL = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
DIT = _HEADS | {"num_embeds_ada_norm": 5, "out_channels": 8}
PIXART = _HEADS | {"cross_attention_dim": 16, "caption_channels": 12, "out_channels": 8}
MOST_MEMORY = 200 * 2**20
DDPM_BETAS = torch.linspace(1e-4, 0.02, 1000)
SD_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def shared_checkpoint(name: str) -> Path:
    """A folder of checkpoints with their own tools' outputs; the test is skipped where there is none."""
    default = Path(__file__).parents[2] / "shared" / "checkpoints"
    folder = Path(os.environ.get("HDDM_CHECKPOINTS", default)) / name
    if not folder.is_dir():
        pytest.skip(f"{folder}: no such folder")
    return folder


def shared(name: str) -> Path:
    """A folder of public files beside the checkout; the test is skipped where there is none."""
    folder = Path(__file__).parents[2] / "shared" / name
    if not folder.is_dir():
        pytest.skip(f"{folder}: no such folder")
    return folder


def randomised(network: ModelMixin, seed: int = 0) -> ModelMixin:
    """Every parameter drawn anew, so that none is zero and every one matters."""
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        scale = 1.0 if "norm" in name and parameter.ndim == 1 else 0.0
        parameter.data = scale + 0.1 * torch.randn(parameter.shape, generator=noise)
    return network.eval().requires_grad_(False)


def rounded(network: ModelMixin, dtype: torch.dtype) -> ModelMixin:
    """The network in float32 with the parameters that a file of ``dtype`` keeps."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return network


def text_unet(seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    return randomised(UNet2DConditionModel(**UNET | changes), seed)


def plain_unet(seed: int = 0, **changes: Any) -> UNet2DModel:
    return randomised(UNet2DModel(**UNCONDITIONAL | changes), seed)


def dit(seed: int = 0, **changes: Any) -> DiTTransformer2DModel:
    return randomised(DiTTransformer2DModel(**DIT | changes), seed)


def pixart(seed: int = 0, **changes: Any) -> PixArtTransformer2DModel:
    return randomised(PixArtTransformer2DModel(**PIXART | changes), seed)


def pipeline(
    folder: Path, network: ModelMixin, scheduler: SchedulerMixin | None = None, **saving: Any
) -> Path:
    """A pipeline folder of one denoiser and its scheduler, written by diffusers."""
    scheduler = scheduler or DDIMScheduler()
    unet = isinstance(network, UNet2DModel | UNet2DConditionModel)
    part = "unet" if unet else "transformer"
    family = family_of(network)
    # A class of a package of its own has none of diffusers' pipelines.
    own = family.pipelines[0].name if family and family.pipelines else "DiffusionPipeline"
    network.save_pretrained(folder / part, **saving)
    scheduler.save_pretrained(folder / "scheduler")
    index = {
        "_class_name": own,
        part: ["diffusers", type(network).__name__],
        "scheduler": ["diffusers", type(scheduler).__name__],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def conditions_of(network: ModelMixin, rows: int = 1) -> dict[str, Tensor]:
    """Conditions of every kind that the network takes, under the names of `VelocityField.velocity`."""
    noise = torch.Generator().manual_seed(3)
    config = network.config
    if isinstance(network, DiTTransformer2DModel | ExpertTransformer):
        return {"class_labels": torch.arange(rows) % 5}
    if isinstance(network, UNet2DModel):
        return {}
    width = config.get("caption_channels") or config["cross_attention_dim"]
    given = {"encoder_hidden_states": torch.randn(rows, 6, width, generator=noise)}
    if config.get("addition_embed_type") == "text_time":
        pooled = (
            config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        )
        given["text_embeds"] = torch.randn(rows, pooled, generator=noise)
        given["time_ids"] = torch.tensor([[64.0, 64, 0, 0, 64, 64]]).expand(rows, 6)
    if config.get("use_additional_conditions"):
        given["resolution"] = torch.tensor([[64.0, 64.0]]).expand(rows, 2)
        given["aspect_ratio"] = torch.tensor([[1.0]]).expand(rows, 1)
    return given


def call(network: ModelMixin, y: Tensor, timestep: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """The raw output of the network itself."""
    added = {
        k: v
        for k, v in given.items()
        if k in ("text_embeds", "time_ids", "resolution", "aspect_ratio")
    }
    plain = {k: v for k, v in given.items() if k not in added}
    nested = {"added_cond_kwargs": added} if added else {}
    if isinstance(network, ExpertTransformer):
        output: Tensor = network(y, timestep, **plain)
        return output
    with torch.no_grad():
        return network(y, timestep=timestep, return_dict=False, **plain, **nested)[0]


def check_velocity(
    expert: Path, network: ModelMixin, betas: Tensor, kind: str = "epsilon", tolerance: float = 2e-5
) -> None:
    """Compare an expert's velocity with the closed form over the network itself."""
    field = hddm.load(expert)
    assert isinstance(field, hddm.VelocityField)
    given = conditions_of(network)
    kept = np.cumprod(1 - betas.double().numpy())
    ratio = np.sqrt((1 - kept) / kept)
    low, high = (r / (1 + r) for r in (ratio[0], ratio[-1]))
    noise = torch.Generator().manual_seed(5)
    size = network.config["sample_size"]
    for share in SHARES:
        t = low + share * (high - low)
        x = torch.randn(1, network.config["in_channels"], size, size, generator=noise)
        # The log-SNR is linear between two timesteps.
        u = float(np.interp(math.log(t / (1 - t)), np.log(ratio), np.arange(len(kept))))
        norm = math.hypot(1 - t, t)
        a, s, y = (1 - t) / norm, t / norm, x / norm
        output = call(network, y, torch.tensor([u], dtype=torch.float32), given)[
            :, : x.shape[1]
        ].double()
        x, y = x.double(), y.double()
        x_0, eps = solved(kind, output, y, torch.tensor(a), torch.tensor(s))
        velocity = field.velocity(x.float(), torch.tensor([t], dtype=torch.float64), **given)
        assert velocity.shape == x.shape
        error = ((velocity - (eps - x_0)).norm() / (eps - x_0).norm()).item()
        assert error < tolerance, f"{error:.1e} at t = {t:.3f}"


def converted(hddm: Command, source: Path, out: Path, *options: object) -> str:
    """What a conversion that succeeds prints."""
    code, text, error = hddm("convert", source, "--out", out, *options)
    assert (code, error) == (0, ""), error
    return text


def written_back(hddm: Command, expert: Path, out: Path, layout: str) -> Path:
    """The folder ``out``, into which an expert is written in another tool's layout."""
    code, _, error = hddm("convert", expert, "--out", out, "--to-layout", layout)
    assert (code, error) == (0, ""), error
    return out


def record_of(expert: Path) -> dict[str, Any]:
    """The content of ``expert.json``."""
    record: dict[str, Any] = json.loads((expert / "expert.json").read_text())
    return record


def refused(hddm: Command, source: Path, *options: object, out: Path | None = None) -> str:
    """The one line of a conversion that fails and leaves its surroundings as they are."""
    folder = source.parent
    before, names = contents(folder), sorted(folder.rglob("*"))
    results: list[tuple[int, str, str]] = []
    out = out or folder / "out"
    grown = grown_by(lambda: results.append(hddm("convert", source, "--out", out, *options)))
    ((code, _, error),) = results
    assert code in (1, 2), error
    assert error.startswith("hddm: ")
    assert error.count("\n") == 1
    assert "unexpected" not in error
    assert "Traceback" not in error
    assert (contents(folder), sorted(folder.rglob("*"))) == (before, names)
    assert grown < MOST_MEMORY
    return error
