"""Single files of latent diffusion: what they do not say is asked for, and the check stands on its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from safetensors.torch import save_file

from hddm.checkpoints import ldm
from hddm.checkpoints.layouts import UnstatedHeads
from tests.artefacts import Command
from tests.checkpoint_files import (
    SD_BETAS,
    call,
    check_velocity,
    conditions_of,
    converted,
    facts_of,
    refused,
    text_unet,
)
from tests.ldm_files import ldm_file, ldm_unet

SIDE = ("--sample-size", 8)
EPSILON = ("--prediction-type", "epsilon")
HEADS = ("--num-heads", 8)
DEEP = {
    "block_out_channels": (32, 64, 64),
    "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": [1, 1, 2],
    "use_linear_projection": True,
    "attention_head_dim": [1, 2, 4],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 6 * 256 + 10,
}


@pytest.mark.parametrize("changes", [{}, {"sample_size": 10}, DEEP], ids=["plain", "odd sides", "xl"])
@torch.no_grad()
def test_the_network_written_out_is_diffusers_own(changes: dict[str, Any]) -> None:
    network = text_unet(**changes)
    side = network.config["sample_size"] + (1 if changes.get("sample_size") else 0)
    x = torch.randn(2, 4, side, side, generator=torch.Generator().manual_seed(0))
    timestep, given = torch.tensor([3.25, 987.5]), conditions_of(network, 2)
    expected = call(network, x, timestep, given)
    found = ldm.forward(ldm_unet(network), network.config)(x, timestep, given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_a_table_of_names_that_is_wrong_fails_the_check(
    hddm: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(ldm_file(text_unet()), tmp_path / "sd.safetensors")
    true = ldm._name

    def swapped(name: str, *others: Any) -> str:
        found = true(name, *others)
        for one, two in (("0", "2"), ("2", "0")):
            if found.startswith(f"middle_block.{one}."):
                return f"middle_block.{two}." + found[len("middle_block.0.") :]
        return found

    monkeypatch.setattr(ldm, "_name", swapped)
    error = refused(hddm, tmp_path / "sd.safetensors", *EPSILON, *SIDE, *HEADS)
    assert "is not the source's" in error


def test_heads_that_no_tensor_tells_are_asked_for(hddm: Command, tmp_path: Path) -> None:
    network = text_unet(attention_head_dim=4)
    save_file(ldm_file(network), tmp_path / "sd.safetensors")
    error = refused(hddm, tmp_path / "sd.safetensors", *EPSILON, *SIDE)
    assert "--num-heads, the same number at every level" in error
    assert "--num-heads 5" in refused(hddm, tmp_path / "sd.safetensors", *EPSILON, "--num-heads", 5)
    converted(hddm, tmp_path / "sd.safetensors", tmp_path / "expert", *EPSILON, *SIDE, "--num-heads", 4)
    check_velocity(tmp_path / "expert", network, DDPMScheduler(**SD_BETAS).betas)


@pytest.mark.parametrize(
    ("widths", "context", "is_linear", "heads"),
    [
        ([320, 640, 1280, 1280], 768, False, 8),
        ([320, 640, 1280, 1280], 1024, True, [5, 10, 20, 20]),
        ([320, 640, 1280], 2048, True, [5, 10, 20]),
        ([320, 640, 1280, 1280], 1024, False, None),
        ([320, 640, 1280, 1280], 1280, False, None),
        ([384, 768, 1536, 1536], 1280, True, None),
    ],
)
def test_heads_are_known_of_published_networks_alone(
    widths: list[int], context: int, is_linear: bool, heads: int | list[int] | None
) -> None:
    if heads is not None:
        assert ldm.unet_heads(widths, context, is_linear, None, "a") == heads
        return
    with pytest.raises(UnstatedHeads):
        ldm.unet_heads(widths, context, is_linear, None, "a")


def test_a_side_that_is_assumed_is_said(hddm: Command, tmp_path: Path) -> None:
    save_file(ldm_file(text_unet()), tmp_path / "sd.safetensors")
    options = (*EPSILON, *HEADS, "--dry-run")
    said = "samples of side 64 are assumed; --sample-size says otherwise"
    assert said in converted(hddm, tmp_path / "sd.safetensors", tmp_path / "expert", *options)
    assert said not in converted(hddm, tmp_path / "sd.safetensors", tmp_path / "expert", *options, *SIDE)


@pytest.mark.parametrize("is_rescaled", [False, True])
def test_a_marker_of_zero_terminal_snr_is_followed(hddm: Command, tmp_path: Path, is_rescaled: bool) -> None:
    network = text_unet(attention_head_dim=8)
    betas = DDPMScheduler(**SD_BETAS, rescale_betas_zero_snr=True).betas
    content = ldm_file(network) | {"ztsnr": torch.zeros(0), "v_pred": torch.zeros(0)}
    if is_rescaled:
        content["betas"] = betas
    save_file(content, tmp_path / "sd.safetensors")
    text = converted(hddm, tmp_path / "sd.safetensors", tmp_path / "expert", *SIDE, *HEADS)
    assert ("rescaled to no signal" in text) != is_rescaled
    assert "a --schedule has to say rescale_betas_zero_snr" in text
    facts = facts_of(tmp_path / "expert")
    assert facts["prediction_type"] == "v_prediction"
    torch.testing.assert_close(torch.tensor(facts["schedule"]["betas"]), betas, rtol=0, atol=1e-5)
    assert facts["schedule"]["betas"][-1] == 1
