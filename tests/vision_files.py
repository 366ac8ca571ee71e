"""Vision models of transformers with random weights, as small as they go."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BitImageProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
)

_SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 14,
    "patch_size": 7,
}
_SIZE = {"height": 14, "width": 14}


def write_vision_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a model of ``kind`` and its image processor."""
    torch.manual_seed(seed)
    if kind == "clip_vision_model":
        config = CLIPVisionConfig(**_SMALL, intermediate_size=32, projection_dim=12)
        model: Any = CLIPVisionModelWithProjection(config)
        processor: Any = CLIPImageProcessor(size={"shortest_edge": 14}, crop_size=_SIZE)
    else:
        processor = BitImageProcessor(size={"shortest_edge": 16}, crop_size=_SIZE)
        if kind == "dinov2":
            model = Dinov2Model(Dinov2Config(**_SMALL))
        else:
            model = Dinov2WithRegistersModel(
                Dinov2WithRegistersConfig(**_SMALL, num_register_tokens=2)
            )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
