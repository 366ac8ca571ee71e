"""Checkpoints of one file, of DiT, PixArt or latent diffusion: weight sets, wrappers and conventions."""

import argparse
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor

import hddm as library
from hddm.checkpoints import ldm
from hddm.checkpoints.single_files import open_file
from hddm.checkpoints.sources import Checkpoint
from hddm.settings import Reading
from hddm.utils.errors import Unstated
from tests.artefacts import Command, refusal
from tests.checkpoint_files import (
    DDPM_BETAS,
    SD_BETAS,
    call,
    check_velocity,
    conditions_of,
    converted,
    pixart,
    record_of,
    refused,
    rounded,
    text_unet,
    written_back,
)
from tests.ldm_files import XL, ldm_file, ldm_unet
from tests.transformer_files import dit_file, dit_network, pixart_file

SD = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
SIDE = ("--sample-size", 8)
HEADS = ("--num-heads", 8)
EPSILON = ("--prediction-type", "epsilon")
SD2 = {"use_linear_projection": True, "attention_head_dim": 4, "block_out_channels": (64, 128)}


def _ldm(seed: int) -> dict[str, Tensor]:
    return ldm_file(text_unet(seed))


def _check_back(hddm: Command, expert: Path, layout: str, expected: dict[str, Tensor]) -> None:
    found = load_file(
        written_back(hddm, expert, expert.parent / "back", layout) / "checkpoint.safetensors"
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("changes", "kind"), [({}, "epsilon"), (SD2, "v_prediction")], ids=["1", "2"]
)
def test_stable_diffusion_in_one_file_and_back(
    hddm: Command, tmp_path: Path, changes: dict[str, Any], kind: str
) -> None:
    network, source = text_unet(**changes), tmp_path / "sd.safetensors"
    save_file(ldm_file(network), source)
    options = (*SIDE, "--num-heads", network.config["attention_head_dim"])
    assert "--prediction-type epsilon" in refused(hddm, source, *options)
    converted(hddm, source, tmp_path / "expert", "--prediction-type", kind, *options)
    check_velocity(tmp_path / "expert", network, SD, kind)
    kept = load_file(source)
    assert "betas" in kept
    code, said, _ = hddm(
        "convert", tmp_path / "expert", "--out", tmp_path / "b", "--to-layout", "ldm"
    )
    assert code == 0
    assert (
        "note: the file holds the network alone, without a whole file's VAE and text encoder"
        in said
    )
    _check_back(hddm, tmp_path / "expert", "ldm", kept)


@pytest.mark.integration
@pytest.mark.parametrize("pickled", [False, True])
def test_averaged_copies_in_a_stable_diffusion_file(
    hddm: Command, tmp_path: Path, pickled: bool
) -> None:
    content, options = ldm_file(text_unet(0), text_unet(1)), (*EPSILON, *SIDE, *HEADS)
    if pickled:
        source, chosen, own = tmp_path / "sd.ckpt", "ema", ("--allow-pickle",)
        torch.save({"state_dict": content, "global_step": 470000, "epoch": 3}, source)
    else:
        source, chosen, own = tmp_path / "sd.safetensors", "raw", ("--weights", "raw")
        save_file(content, source)
    text = converted(hddm, source, tmp_path / "expert", *options, *own)
    assert f"weights: {chosen} (present: raw, ema)" in text
    check_velocity(tmp_path / "expert", text_unet(int(pickled)), SD)


@pytest.mark.integration
def test_sdxl_in_one_file_says_neither_schedule_nor_prediction(
    hddm: Command, tmp_path: Path
) -> None:
    network = rounded(text_unet(**XL), torch.float16)
    source, options = tmp_path / "xl.safetensors", (*SIDE, "--num-heads", 2)
    content = ldm_unet(copy.deepcopy(network).half())
    save_file(content, source)
    error = refused(hddm, source, *options)
    assert "pass --preset sdxl, sdxl-v, sdxl-flow, playground-2.5 or cosxl, or --schedule" in error
    EulerDiscreteScheduler(**SD_BETAS, prediction_type="epsilon").save_pretrained(tmp_path)
    file = tmp_path / "scheduler_config.json"
    converted(hddm, source, tmp_path / "expert", "--schedule", file, *options)
    check_velocity(tmp_path / "expert", network, SD)
    _check_back(hddm, tmp_path / "expert", "ldm", content)


Wrap = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Any]]
OPTIMISER = {
    "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}},
    "param_groups": [{"lr": 1e-4}],
}
ARGS = argparse.Namespace(model="DiT-XL/2", lr=None, image_size=256)


DIT_SETS = dit_file(dit_network(0)), dit_file(dit_network(1))


def _opened(content: dict[str, Any], folder: Path, weights: str | None = None) -> Checkpoint:
    torch.save(content, folder / "a.pt")
    return open_file(folder / "a.pt", Reading(allow_pickle=True, num_heads=4, weights=weights))


def _is_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[k], v) for k, v in expected.items()
    )


@pytest.mark.integration
@pytest.mark.parametrize(
    "wrap",
    [
        lambda raw, ema: {"model": raw, "ema": ema, "opt": OPTIMISER, "args": ARGS},
        lambda raw, ema: {"model": raw, "ema": {"decay": 0.999, "shadow": ema}},
        lambda raw, ema: {"model": {"module": raw}, "ema": {"module": ema}},
        lambda raw, ema: {"state_dict": raw, "ema": {"shadow_params": ema}},
    ],
)
def test_averaged_weights_are_found_under_all_their_names(tmp_path: Path, wrap: Wrap) -> None:
    raw, ema = DIT_SETS
    found = _opened(wrap(raw, ema), tmp_path)
    assert (set(found.sets), found.chosen) == ({"raw", "ema"}, "ema")
    assert _is_same(found.weights, ema)
    assert _is_same(_opened(wrap(raw, ema), tmp_path, "raw").weights, raw)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda raw, ema: {"model": raw, "teacher": ema}, "under 'teacher'"),
        (lambda raw, ema: {"ema": raw, "model_ema": ema}, "'ema' and 'model_ema'"),
        (lambda raw, ema: {**raw, "ema": ema}, "its top level and 'ema'"),
        (lambda raw, ema: {"model": {**raw, "shadow": ema}}, "under 'model'"),
        (
            lambda raw, ema: {"state_dict": _ldm(0), "state_dict_ema": _ldm(1)},
            "'state_dict' and 'state_dict_",
        ),
        (lambda raw, ema: {"state_dict": _ldm(0), "other": _ldm(1)}, "under 'other'"),
    ],
)
def test_weights_that_do_not_say_which_they_are(tmp_path: Path, wrap: Wrap, said: str) -> None:
    assert said in refusal(_opened, wrap(*DIT_SETS), tmp_path)


@pytest.mark.integration
def test_averages_without_names_are_never_passed_over(tmp_path: Path) -> None:
    raw, ema = DIT_SETS
    content = {"model": raw, "ema": {"decay": 0.999, "shadow_params": list(ema.values())}}
    assert "`weights` raw" in refusal(_opened, content, tmp_path)
    assert _is_same(_opened(content, tmp_path, "raw").weights, raw)
    # Under prefixes of one dictionary they are of no layout.
    flat = {f"model.{name}": tensor for name, tensor in raw.items()}
    flat |= {f"ema.{n}": tensor for n, tensor in enumerate(ema.values())}
    assert "of no known layout" in refusal(_opened, flat, tmp_path)


@pytest.mark.parametrize("wrapping", ["bare", "prefixed", "published"])
def test_a_file_with_one_set_does_not_say_which_it_is(
    hddm: Command, tmp_path: Path, wrapping: str
) -> None:
    network, options = dit_network(), ["--num-heads", 4]
    content, source = dit_file(network), tmp_path / "dit.safetensors"
    if wrapping == "prefixed":
        content = {f"model.module._orig_mod.{name}": tensor for name, tensor in content.items()}
    if wrapping == "published":
        source = tmp_path / "dit.pt"
        torch.save({"state_dict": content}, source)
        options.append("--allow-pickle")
    else:
        save_file(content, source)
    text = converted(hddm, source, tmp_path / "expert", *options)
    assert ("prefix: 'model.module._orig_mod.'" in text) == (wrapping == "prefixed")
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)
    facts = record_of(tmp_path / "expert")
    assert (facts["weights"], facts["schedule_source"]) == (
        "unstated",
        "the code of layout facebook-dit",
    )
    _check_back(hddm, tmp_path / "expert", "facebook-dit", content)
    assert "--weights raw" in refused(hddm, source, "--weights", "raw", *options)


def test_pixarts_own_file_without_positions_and_back(hddm: Command, tmp_path: Path) -> None:
    network, source = pixart(0), tmp_path / "pixart.pth"
    raw, content = (pixart_file(one, positions=False) for one in (pixart(1), network))
    torch.save({"state_dict": raw, "state_dict_ema": content, "epoch": 1}, source)
    options = ["--num-heads", 2, "--allow-pickle"]
    assert "--sample-size" in refused(hddm, source, *options)
    converted(hddm, source, tmp_path / "expert", *options, *SIDE)
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)
    field = library.load(tmp_path / "expert")
    assert torch.equal(
        field.null_conditions["encoder_hidden_states"], content["y_embedder.y_embedding"]
    )
    _check_back(hddm, tmp_path / "expert", "pixart-original", content)


@pytest.mark.integration
@pytest.mark.parametrize("half", [False, True])
def test_pixarts_own_file_with_sizes_as_conditions(
    hddm: Command, tmp_path: Path, half: bool
) -> None:
    dtype = torch.float16 if half else torch.float32
    network = pixart(use_additional_conditions=True, attention_head_dim=12, cross_attention_dim=24)
    rounded(network, dtype)
    content = {f"module.{name}": tensor.to(dtype) for name, tensor in pixart_file(network).items()}
    save_file(content, tmp_path / "pixart.safetensors")
    text = converted(hddm, tmp_path / "pixart.safetensors", tmp_path / "expert", "--num-heads", 2)
    assert "not needed: pos_embed, computed anew" in text
    check_velocity(tmp_path / "expert", network, DDPM_BETAS)
    _check_back(hddm, tmp_path / "expert", "pixart-original", content)


DEEP = {
    **XL,
    "block_out_channels": (32, 64, 64),
    "layers_per_block": 2,
    "attention_head_dim": [1, 2, 4],
}


@pytest.mark.parametrize(
    "changes", [{}, {"sample_size": 10}, DEEP], ids=["plain", "odd sides", "xl"]
)
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
    assert "nothing was written" in error


def test_heads_that_no_tensor_tells_are_asked_for(hddm: Command, tmp_path: Path) -> None:
    network = text_unet(attention_head_dim=4)
    save_file(ldm_file(network), tmp_path / "sd.safetensors")
    error = refused(hddm, tmp_path / "sd.safetensors", *EPSILON, *SIDE)
    assert "--num-heads, the same number at every level" in error
    assert "--num-heads 5" in refused(hddm, tmp_path / "sd.safetensors", *EPSILON, "--num-heads", 5)
    converted(
        hddm, tmp_path / "sd.safetensors", tmp_path / "expert", *EPSILON, *SIDE, "--num-heads", 4
    )
    check_velocity(tmp_path / "expert", network, DDPMScheduler(**SD_BETAS).betas)


def test_heads_are_known_of_published_networks_alone() -> None:
    sd = [320, 640, 1280, 1280]
    for widths, context, is_linear, heads in (
        (sd, 768, False, 8),
        (sd, 1024, True, [5, 10, 20, 20]),
        (sd[:3], 2048, True, [5, 10, 20]),
    ):
        assert ldm.unet_heads(widths, context, is_linear, Reading(), "a") == heads
    for widths, context, is_linear in (
        (sd, 1024, False),
        (sd, 1280, False),
        ([384, 768, 1536], 1280, True),
    ):
        with pytest.raises(Unstated):
            ldm.unet_heads(widths, context, is_linear, Reading(), "a")


@pytest.mark.parametrize("is_rescaled", [False, True])
def test_a_marker_of_zero_terminal_snr_is_followed(
    hddm: Command, tmp_path: Path, is_rescaled: bool
) -> None:
    network = text_unet(attention_head_dim=8)
    betas = DDPMScheduler(**SD_BETAS, rescale_betas_zero_snr=True).betas
    content = ldm_file(network) | {"ztsnr": torch.zeros(0), "v_pred": torch.zeros(0)}
    if is_rescaled:
        content["betas"] = betas
    save_file(content, tmp_path / "sd.safetensors")
    text = converted(hddm, tmp_path / "sd.safetensors", tmp_path / "expert", *SIDE, *HEADS)
    assert ("rescaled to no signal" in text) != is_rescaled
    assert "note: ztsnr" not in text
    facts = record_of(tmp_path / "expert")
    assert facts["prediction_type"] == "v_prediction"
    torch.testing.assert_close(torch.tensor(facts["schedule"]["betas"]), betas, rtol=0, atol=1e-5)
    assert facts["schedule"]["betas"][-1] == 1


def test_a_schedule_that_keeps_signal_is_refused_for_a_network_trained_down_to_none(
    hddm: Command, tmp_path: Path
) -> None:
    source, file = tmp_path / "sd.safetensors", tmp_path / "other" / "scheduler_config.json"
    save_file(ldm_file(text_unet(attention_head_dim=8)) | {"ztsnr": torch.zeros(0)}, source)
    for scheduler in (DDPMScheduler(**SD_BETAS), FlowMatchEulerDiscreteScheduler()):
        scheduler.save_pretrained(file.parent)
        error = refused(hddm, source, *SIDE, *HEADS, "--schedule", file)
        assert f"trained down to zero signal, which contradicts the schedule of {file}" in error
        assert (
            "pass --schedule with a config of DDPM's family that has rescale_betas_zero_snr"
            in error
        )
    DDPMScheduler(**SD_BETAS, rescale_betas_zero_snr=True).save_pretrained(file.parent)
    text = converted(hddm, source, tmp_path / "expert", *SIDE, *HEADS, "--schedule", file)
    assert "zero signal" not in text


V = {"modelspec.prediction_type": "v"}


@pytest.mark.parametrize(
    "header",
    [V, {"modelspec.predict_key": "v"}, {"modelspec.architecture": "stable-diffusion-v2-768-v"}],
    ids=lambda header: next(iter(header)),
)
def test_what_a_header_says_of_prediction_and_licence_is_used_and_recorded(
    hddm: Command, tmp_path: Path, header: dict[str, str]
) -> None:
    network, source = text_unet(attention_head_dim=8), tmp_path / "sd.safetensors"
    save_file(ldm_file(network), source, {**header, "modelspec.license": "CreativeML Open RAIL-M"})
    text = converted(hddm, source, tmp_path / "expert", *SIDE, *HEADS)
    check_velocity(tmp_path / "expert", network, SD, "v_prediction")
    place = f"{next(iter(header))} in the header of sd.safetensors"
    assert f"note: v_prediction by {place}" in text
    assert "licence: CreativeML Open RAIL-M" in text
    facts = record_of(tmp_path / "expert")
    assert facts["licence"] == "CreativeML Open RAIL-M"
    assert facts["source"]["prediction_source"] == place
    assert "states 'CreativeML Open RAIL-M'" in refused(
        hddm, source, *SIDE, *HEADS, "--licence", "mit"
    )


def test_a_header_that_contradicts_a_file_a_layout_or_an_option_is_refused(
    hddm: Command, tmp_path: Path
) -> None:
    source, options = tmp_path / "sd.safetensors", (*SIDE, *HEADS)
    content = ldm_file(text_unet(attention_head_dim=8))
    save_file(
        content | {"v_pred": torch.zeros(0)}, source, {"modelspec.prediction_type": "epsilon"}
    )
    error = refused(hddm, source, *options)
    assert (
        "its tensor v_pred says v_prediction, which contradicts modelspec.prediction_type in the"
        in error
    )
    assert "header of sd.safetensors, which says epsilon; correct the header" in error

    save_file(dit_file(dit_network()), tmp_path / "dit.safetensors", V)
    error = refused(hddm, tmp_path / "dit.safetensors", "--num-heads", 4)
    assert "which contradicts the code of layout facebook-dit, which says epsilon" in error

    save_file(content, source, {"modelspec.prediction_type": "edm"})
    assert "says 'edm', which hddm does not know; pass --prediction-type" in refused(
        hddm, source, *options
    )

    save_file(content, source, V)
    error = refused(hddm, source, *options, *EPSILON)
    assert "--prediction-type says epsilon, which contradicts modelspec.prediction_type" in error

    file = tmp_path / "scheduler" / "scheduler_config.json"
    DDPMScheduler(**SD_BETAS, prediction_type="epsilon").save_pretrained(file.parent)
    error = refused(hddm, source, *options, "--schedule", file)
    assert f"{file} says epsilon, which contradicts modelspec.prediction_type" in error


def test_all_options_that_are_missing_are_named_at_once(hddm: Command, tmp_path: Path) -> None:
    source = tmp_path / "sd.safetensors"
    save_file(ldm_file(text_unet(attention_head_dim=8)), source)
    error = refused(hddm, source, *SIDE)
    assert "does not state 2 things that a conversion needs" in error
    assert "--num-heads" in error
    assert "--prediction-type epsilon" in error

    save_file({key: one for key, one in load_file(source).items() if key != "betas"}, source)
    assert {"--num-heads", "--schedule"} <= set(
        refused(hddm, source, *SIDE).replace(",", "").split()
    )

    torch.save(pixart_file(pixart(), positions=False), tmp_path / "pixart.pth")
    error = refused(hddm, tmp_path / "pixart.pth", "--allow-pickle")
    assert "--num-heads" in error
    assert "--sample-size" in error


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda name, one: {name: (100 * one).to(torch.int8), f"{name}_scale": torch.ones(1)},
            "in int8 with a scale), and hddm reads float8_e4m3fn and float8_e5m2",
        ),
        (
            lambda name, one: {name: (100 * one).to(torch.int8)},
            "in int8), which hddm does not read",
        ),
        (
            lambda name, one: {
                name: one.flatten()[:, None].byte(),
                f"{name}.absmax": torch.ones(1),
            },
            "int8 and 1 more), which hddm does not read",
        ),
    ],
    ids=["int8 with scales", "int8", "4 bits"],
)
def test_quantised_files_are_called_so(
    hddm: Command, tmp_path: Path, change: Callable[[str, Tensor], dict[str, Tensor]], said: str
) -> None:
    unet = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
    for content, name in (
        (ldm_file(text_unet()), unet),
        (dit_file(dit_network()), "blocks.0.attn.qkv.weight"),
    ):
        source = tmp_path / "quantised.safetensors"
        save_file(content | change(name, content[name]), source)
        error = refused(hddm, source, *SIDE)
        assert "holds quantised weights (" in error
        assert said in error
        assert error.endswith("use the version in float16 or float32\n")


def test_plain_float8_is_no_quantisation(tmp_path: Path) -> None:
    content = {name: one.to(torch.float8_e4m3fn) for name, one in dit_file(dit_network()).items()}
    save_file(content, tmp_path / "a.safetensors")
    assert open_file(tmp_path / "a.safetensors", Reading(num_heads=4)).layout == "facebook-dit"


def test_a_single_file_is_never_told_to_correct_its_config(hddm: Command, tmp_path: Path) -> None:
    source = tmp_path / "xl.safetensors"
    content = ldm_unet(text_unet(**XL))
    label = "model.diffusion_model.label_emb.0.0.weight"
    # Narrower than its six numbers alone.
    save_file(content | {label: content[label][:, :100].contiguous()}, source)
    DDPMScheduler(**SD_BETAS).save_pretrained(tmp_path)
    options = ("--schedule", tmp_path / "scheduler_config.json", *SIDE, "--num-heads", 2)
    error = refused(hddm, source, *options)
    assert f"{label} takes a vector of width 100; Stable Diffusion XL's is wider than 1536" in error
    assert not any(word in error for word in ("config", "projection_class_embeddings_input_dim"))
