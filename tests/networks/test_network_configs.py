"""What a config may ask for is bounded by the tensors beside it."""

from typing import Any

import pytest
from diffusers import (
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    ModelMixin,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
)

from hddm.networks.folders import empty_network
from hddm.utils.errors import HddmError
from tests.checkpoint_files import DIT, UNCONDITIONAL, UNET
from tests.hostile import grown_by

NESTED: Any = 1
for _ in range(900):
    NESTED = [NESTED]


def _refusal(kind: type[ModelMixin], arguments: dict[str, Any], num_tensors: int) -> tuple[str, int]:
    """The message of a refusal, and the bytes that it takes."""
    said: list[str] = []

    def build() -> None:
        with pytest.raises(HddmError) as refused:
            empty_network(kind, arguments, num_tensors, "config.json")
        said.append(str(refused.value))

    grown = grown_by(build)
    assert "\n" not in said[0]
    return said[0], grown


@pytest.mark.parametrize(
    "changes",
    [
        {"reverse_transformer_layers_per_block": [[1, 3000], 1], "transformer_layers_per_block": [[1], 1]},
        {"transformer_layers_per_block": 3000},
        {"layers_per_block": [1, 3000]},
        {"layers_per_block": 60, "transformer_layers_per_block": 60},
        {"down_block_types": ["DownBlock2D"] * 3000},
        {"block_out_channels": [32] * 10**6},
        {"layers_per_block": 10**4000, "transformer_layers_per_block": 10**4000},
        {"layers_per_block": NESTED},
        {"reverse_transformer_layers_per_block": [1, [[[10**9]]]]},
        {"attention_head_dim": [8] * 10**6},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_more_layers_than_the_tensors_are_for_are_refused_at_once(changes: dict[str, Any]) -> None:
    assert _refusal(UNet2DConditionModel, {**UNET, **changes}, 700)[1] < 32 * 2**20


DEEP = {**UNET, "transformer_layers_per_block": [128, 1], "layers_per_block": 1}
MANY = {"attention_head_dim": 128, "num_layers": 256}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments", "deeper"),
    [
        (UNet2DConditionModel, DEEP, {"layers_per_block": 3}),
        (DiTTransformer2DModel, {**DIT, "num_layers": 256}, {"num_layers": 257}),
        (SD3Transformer2DModel, MANY, {"num_layers": 257}),
        (FluxTransformer2DModel, MANY | {"num_single_layers": 256}, {"num_single_layers": 257}),
    ],
)
def test_the_most_that_may_be_asked_for_is_little_work(
    kind: type[ModelMixin], arguments: dict[str, Any], deeper: dict[str, Any]
) -> None:
    """However many tensors a file pretends to have."""
    assert grown_by(lambda: empty_network(kind, arguments, 10**6, "config.json")) < 200 * 2**20
    assert "its depth is" in _refusal(kind, arguments | deeper, 10**6)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_class_embeds": 10**12},
        {"addition_embed_type": "text", "encoder_hid_dim": 10**9, "addition_embed_type_num_heads": 10**9},
        {"time_embedding_type": "fourier", "time_embedding_dim": 10**9},
        {"time_cond_proj_dim": 10**9},
        {"conv_in_kernel": 10**5 + 1},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_numbers_that_make_no_modules_cost_nothing(changes: dict[str, Any]) -> None:
    arguments = {**UNET, **changes}
    assert grown_by(lambda: empty_network(UNet2DConditionModel, arguments, 700, "config.json")) < 32 * 2**20


@pytest.mark.parametrize(
    ("kind", "arguments", "block"),
    [
        (UNet2DModel, UNCONDITIONAL | {"down_block_types": ["KDownBlock2D"] * 2}, "KDownsample2D"),
        (UNet2DConditionModel, UNET | {"up_block_types": ["KUpBlock2D"] * 2}, "KUpsample2D"),
    ],
)
def test_blocks_with_constants_that_no_file_holds_are_refused(
    kind: type[ModelMixin], arguments: dict[str, Any], block: str
) -> None:
    said = _refusal(kind, arguments, 700)[0]
    assert f"is a {block}, whose constants are in no file; such blocks are not supported" in said
