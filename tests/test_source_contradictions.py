"""Sources whose parts contradict each other, or what the user says, are never read by guessing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.artefacts import Command
from tests.checkpoint_files import (
    DDPM_BETAS,
    check_velocity,
    converted,
    dit,
    facts_of,
    pipeline,
    refused,
    text_unet,
)
from tests.ldm_files import ldm_file
from tests.transformer_files import dit_file, dit_network

WEIGHTS = "diffusion_pytorch_model"


@pytest.mark.parametrize(
    ("name", "seed", "chosen"),
    [
        (f"{WEIGHTS}.safetensors", 0, "ema"),
        (f"{WEIGHTS}.non_ema.safetensors", 1, "raw"),
        (f"{WEIGHTS}.fp16.safetensors", 2, "unstated"),
        (f"{WEIGHTS}.bin", 3, "ema"),
    ],
)
def test_exactly_the_file_that_is_named_is_read(
    hddm: Command, tmp_path: Path, name: str, seed: int, chosen: str
) -> None:
    folder = pipeline(tmp_path / "dit", dit(0)) / "transformer"
    dit(1).save_pretrained(folder, variant="non_ema")
    dit(2).save_pretrained(folder, variant="fp16")
    plain = (folder / f"{WEIGHTS}.safetensors").read_bytes()
    dit(3).save_pretrained(folder, safe_serialization=False)
    (folder / f"{WEIGHTS}.safetensors").write_bytes(plain)
    pickled = ("--allow-pickle",) if name.endswith("bin") else ()
    converted(hddm, folder / name, tmp_path / "expert", *pickled)
    facts = facts_of(tmp_path / "expert")
    assert (facts["weights"], list(facts["source"]["files"])) == (chosen, [name])
    check_velocity(tmp_path / "expert", dit(seed), DDPM_BETAS)
    error = refused(hddm, folder / name, "--variant", "other", *pickled, out=tmp_path / "no")
    assert "--variant other" in error
    other = "ema" if chosen == "raw" else "raw"
    assert f"--weights {other}" in refused(hddm, folder / name, "--weights", other, *pickled)


def test_a_shard_alone_is_no_model(hddm: Command, tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "dit", dit(), max_shard_size="10KB") / "transformer"
    shard = next(folder.glob("*-00001-of-*"))
    assert "name its folder" in refused(hddm, shard)
    converted(hddm, folder / f"{WEIGHTS}.safetensors.index.json", tmp_path / "expert")
    check_velocity(tmp_path / "expert", dit(), DDPM_BETAS)


Wrap = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Any]]
HEADS = ("--allow-pickle", "--num-heads", 4)


def _flat(head: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{head}.{name}": tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda raw, ema: {"model": raw, "ema": {"decay": 0.999, "shadow": ema}},
        lambda raw, ema: {"model": {"module": raw}, "ema": {"module": ema}},
        lambda raw, ema: {"state_dict": raw, "ema": {"shadow_params": ema}},
        lambda raw, ema: {"model": raw, "model_ema": ema},
        lambda raw, ema: {"model": raw, "ema_model": ema},
        lambda raw, ema: {"model": raw, "ema_state_dict": ema},
        lambda raw, ema: {
            f"{head}.{k}": v for head, w in (("model", raw), ("model_ema", ema)) for k, v in w.items()
        },
    ],
)
def test_averaged_weights_are_found_under_all_their_names(hddm: Command, tmp_path: Path, wrap: Wrap) -> None:
    source = tmp_path / "dit.pt"
    torch.save(wrap(dit_file(dit_network(0)), dit_file(dit_network(1))), source)
    converted(hddm, source, tmp_path / "expert", *HEADS)
    assert facts_of(tmp_path / "expert")["weights"] == "ema"
    check_velocity(tmp_path / "expert", dit_network(1), DDPM_BETAS)
    converted(hddm, source, tmp_path / "raw", *HEADS, "--weights", "raw")
    check_velocity(tmp_path / "raw", dit_network(0), DDPM_BETAS)


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda raw, ema: {"model": raw, "teacher": ema}, "under 'teacher'"),
        (lambda raw, ema: {**raw, "teacher": ema}, "under 'teacher'"),
        (lambda raw, ema: {"model": raw, "state_dict": ema}, "'model' and 'state_dict'"),
        (lambda raw, ema: {"ema": raw, "model_ema": ema}, "'ema' and 'model_ema'"),
        (lambda raw, ema: {**raw, "ema": ema}, "its top level and 'ema'"),
        (lambda raw, ema: {"model": {"model": raw, "module": ema}}, "under 'model'"),
        (lambda raw, ema: {"model": {**raw, "shadow": ema}}, "under 'model'"),
    ],
)
def test_weights_that_do_not_say_which_they_are(hddm: Command, tmp_path: Path, wrap: Wrap, said: str) -> None:
    torch.save(wrap(dit_file(dit_network(0)), dit_file(dit_network(1))), tmp_path / "dit.pt")
    error = refused(hddm, tmp_path / "dit.pt", *HEADS)
    assert said in error
    assert "save one set in a file of its own" in error


@pytest.mark.parametrize("named", [False, True])
def test_averages_without_names_are_never_passed_over(hddm: Command, tmp_path: Path, named: bool) -> None:
    raw = dit_file(dit_network(0))
    ema = list(dit_file(dit_network(1)).values())
    content: dict[str, Any] = {"model": raw, "ema": {"decay": 0.999, "shadow_params": ema}}
    if named:
        content = _flat("model", raw) | _flat("ema", dict(zip("abc", ema, strict=False)))
    torch.save(content, tmp_path / "dit.pt")
    assert "--weights raw" in refused(hddm, tmp_path / "dit.pt", *HEADS)
    converted(hddm, tmp_path / "dit.pt", tmp_path / "expert", *HEADS, "--weights", "raw")
    check_velocity(tmp_path / "expert", dit_network(0), DDPM_BETAS)


def test_two_latent_diffusion_networks_in_one_file(hddm: Command, tmp_path: Path) -> None:
    one, two = ldm_file(text_unet(0)), ldm_file(text_unet(1))
    for content, said in (
        ({"state_dict": one, "state_dict_ema": two}, "'state_dict' and 'state_dict_ema'"),
        ({"state_dict": one, "other": two}, "under 'other'"),
    ):
        torch.save(content, tmp_path / "sd.ckpt")
        assert said in refused(hddm, tmp_path / "sd.ckpt", "--prediction-type", "epsilon", *HEADS)
