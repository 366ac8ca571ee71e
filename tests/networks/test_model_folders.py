"""Network folders: read whole, as written, or refused by name; a config asks for no more than is there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    ModelMixin,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
)
from safetensors.torch import load_file, save_file

from hddm.networks.folders import empty_network, of_experts, unread_network
from hddm.networks.sizes import size_config
from hddm.networks.transformers import ExpertTransformer
from hddm.utils.records import WEIGHTS
from tests.artefacts import edit_json, refusal
from tests.checkpoint_files import DIT, UNCONDITIONAL, UNET
from tests.hostile import grown_by


@pytest.fixture
def network() -> ExpertTransformer:
    torch.manual_seed(0)
    return ExpertTransformer(sample_size=4, in_channels=1, **size_config("tiny"))


@pytest.fixture
def folder(network: ExpertTransformer, tmp_path: Path) -> Path:
    network.save_pretrained(tmp_path)
    return tmp_path


def _refusal(folder: Path) -> str:
    message = refusal(lambda: unread_network(folder, of_experts()).load(torch.float32))
    assert "\n" not in message
    return message


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("asked", [torch.float32, torch.float64])
def test_what_is_read_is_what_was_written_in_the_dtype_asked_for(
    network: ExpertTransformer, folder: Path, stored: torch.dtype, asked: torch.dtype
) -> None:
    network.to(stored).save_pretrained(folder)
    again = unread_network(folder, of_experts()).load(asked)
    assert dict(again.config) == {k: v for k, v in network.config.items() if not k.startswith("_")}
    for key, value in network.state_dict().items():
        assert torch.equal(again.state_dict()[key], value.to(asked))
    assert not again.training
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_every_tensor_that_does_not_fit_is_named(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["patch_embed.bias"]
    weights["pos_embed"] = weights["pos_embed"][:, :3].contiguous()
    weights["stray"] = torch.zeros(2, 3)
    save_file(weights, folder / WEIGHTS)
    message = _refusal(folder)
    assert str(folder / WEIGHTS) in message
    assert "missing patch_embed.bias (32,)" in message
    assert "pos_embed is (1, 3, 32), not (1, 4, 32)" in message
    assert "left over stray (2, 3)" in message
    assert message.count(";") == 2
    save_file({f"x{number}": torch.zeros(1) for number in range(1000)} | weights, folder / WEIGHTS)
    assert _refusal(folder).endswith("; … and 983 more")


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_missing_file_is_named_and_a_truncated_one(name: str, folder: Path) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-100])
    assert f"{folder / name}: cannot be read as" in _refusal(folder)
    (folder / name).unlink()
    assert f"{folder / name}: no such file" in _refusal(folder)


_NONE = "no network can be built from it"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        *(({"patch_size": 0}, _NONE), ({"num_heads": 0}, _NONE), ({"num_heads": 3}, _NONE)),
        ({"depth": 10**9}, "its depth is"),
        (
            {"_class_name": "RouterTransformer"},
            "holds a RouterTransformer, not a ",
        ),
        ({"_class_name": None}, "names no class (_class_name), of a"),
        (
            {"hidden_sise": 32},
            "ExpertTransformer has no key 'hidden_sise'; did you mean 'hidden_size'?",
        ),
        ({"auto_map": {"AutoModel": "x.Y"}}, "ExpertTransformer has no key"),
        *(
            ({"hidden_size": "wide"}, _NONE),
            ({"sample_size": [4, 4]}, _NONE),
            ({"depth": None}, _NONE),
        ),
        ({"hidden_size": 10**30}, _NONE),
        *(({"frequency_shift": value}, f"{_NONE} (frequency_shift is") for value in ("1", 10**30)),
        ({"norm_eps": "small"}, _NONE),
        ({"modulation": "one"}, f"{_NONE} (modulation is one, and must be"),
    ],
    ids=str,
)
def test_a_config_that_makes_no_network_is_refused(
    change: dict[str, object], problem: str, folder: Path
) -> None:
    edit_json(folder / "config.json", **change)
    assert f"{folder / 'config.json'}: {problem}" in _refusal(folder)


def test_a_declared_size_takes_no_memory_before_it_is_compared(folder: Path) -> None:
    """Ten terabytes of positions: the file's own shapes refuse them first."""
    edit_json(folder / "config.json", sample_size=600_000)
    assert "pos_embed is (1, 4, 32), not (1, 90000000000, 32)" in _refusal(folder)


def test_weights_that_are_not_finite_are_refused_by_name(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    for value in (torch.nan, torch.inf):
        weights["final_layer.linear.bias"][1] = value
        save_file(weights, folder / WEIGHTS)
        assert "'final_layer.linear.bias' holds NaN or Inf" in _refusal(folder)


def test_weights_of_another_dtype_are_cast_into_one_block_of_memory(folder: Path) -> None:
    stored = load_file(folder / WEIGHTS)
    read = unread_network(folder, of_experts()).read(torch.bfloat16)
    assert all(torch.equal(read[key], value.bfloat16()) for key, value in stored.items())
    assert read.keys() == stored.keys()
    assert len({value.untyped_storage().data_ptr() for value in read.values()}) == 1
    assert all(value.data_ptr() % 64 == 0 for value in read.values())


NESTED: Any = 1
for _ in range(900):
    NESTED = [NESTED]


def _grown_refusal(
    kind: type[ModelMixin], arguments: dict[str, Any], num_tensors: int
) -> tuple[str, int]:
    """The message of a refusal, and the bytes that it takes."""
    said: list[str] = []
    asked = (kind, arguments, num_tensors, "config.json")
    grown = grown_by(lambda: said.append(refusal(empty_network, *asked)))
    assert "\n" not in said[0]
    return said[0], grown


@pytest.mark.parametrize(
    "changes",
    [
        {
            "reverse_transformer_layers_per_block": [[1, 3000], 1],
            "transformer_layers_per_block": [[1], 1],
        },
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
    assert _grown_refusal(UNet2DConditionModel, {**UNET, **changes}, 700)[1] < 32 * 2**20


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
    assert "its depth is" in _grown_refusal(kind, arguments | deeper, 10**6)[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_class_embeds": 10**12},
        {
            "addition_embed_type": "text",
            "encoder_hid_dim": 10**9,
            "addition_embed_type_num_heads": 10**9,
        },
        {"time_embedding_type": "fourier", "time_embedding_dim": 10**9},
        {"time_cond_proj_dim": 10**9},
        {"conv_in_kernel": 10**5 + 1},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_numbers_that_make_no_modules_cost_nothing(changes: dict[str, Any]) -> None:
    arguments = {**UNET, **changes}
    assert (
        grown_by(lambda: empty_network(UNet2DConditionModel, arguments, 700, "config.json"))
        < 32 * 2**20
    )


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
    said = _grown_refusal(kind, arguments, 700)[0]
    assert f"is a {block}, whose constants are in no file; such blocks are not supported" in said
