"""Ensembles as networks of ComfyUI's, called as its samplers call them."""

import copy
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hddm.networks.offload import holder_of
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.routers import Router
from hddm.utils.errors import HddmError
from integrations.comfyui.ensembles import (
    PREFIX,
    Decoder,
    EnsembleNetwork,
    LoadEnsemble,
    PromptReader,
    check_room,
)
from integrations.comfyui.mixing import ROWS
from tests.ensemble_files import flow_expert, write_ensemble

STEPS, SEED = 4, 5


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> HDDMPipeline:
    folder = tmp_path_factory.mktemp("ensemble")
    experts = [flow_expert(seed, num_classes=3) for seed in range(2)]
    found = HDDMPipeline.from_pretrained(write_ensemble(folder, experts))
    found.set_progress_bar_config(disable=True)
    return found


def conditions_of(pipe: HDDMPipeline, text: str, num: int) -> dict[str, Tensor]:
    """What ComfyUI hands to the network of a prompt, repeated to the batch."""
    ((_, facts),) = PromptReader(pipe).encode_from_tokens_scheduled(text)
    given: Mapping[str, Tensor] = facts.get("hddm", {})
    return {PREFIX + name: value.expand(num, *value.shape[1:]) for name, value in given.items()}


def sampled(
    network: EnsembleNetwork, x: Tensor, pipe: HDDMPipeline, text: str, cfg: float
) -> Tensor:
    """Euler's method as ComfyUI has it: the branches of guidance have other conditions, so two calls."""
    network.begin_sampling(SEED)
    times = torch.linspace(1, 0, STEPS + 1)
    for now, then in itertools.pairwise(times):
        at = torch.full((len(x),), 1000 * float(now))
        found = []
        for branch, words in ((0, text), (1, "")):
            options = {"cond_or_uncond": [branch]}
            given = conditions_of(pipe, words, len(x))
            found.append(network(x, at, transformer_options=options, **given))
        with_text, without = found
        x = x + (then - now) * (without + cfg * (with_text - without))
    return x


@pytest.mark.parametrize("strategy", ["draw", "full", "top-1", "commit-0.6"])
@pytest.mark.parametrize(("text", "cfg"), [("", 1.0), ("cat", 1.0), ("dog", 2.0)])
def test_samples_are_those_of_the_pipeline(
    pipe: HDDMPipeline, strategy: str, text: str, cfg: float
) -> None:
    noise = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"guidance_scale": cfg, "strategy": strategy, "seed": SEED}
    asked: dict[str, Any] = {"prompt": text} if text else {}
    wanted = pipe(
        **asked,
        **how,
        num_images_per_prompt=6,
        latents=noise,
        num_inference_steps=STEPS,
        solver="euler",
        output_type="latent",
    ).images
    with torch.no_grad():
        network = EnsembleNetwork(pipe.ensemble.under(strategy), None)
        found = sampled(network, noise, pipe, text, cfg)
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_one_expert_alone_makes_all_pictures(pipe: HDDMPipeline) -> None:
    x, at = torch.randn(2, 3, 4, 4), torch.tensor([500.0, 500.0])
    with torch.no_grad():
        found = EnsembleNetwork(pipe.ensemble, 1)(x, at)
        wanted = pipe.ensemble.experts[1].velocity(x, torch.tensor(0.5))
    assert torch.allclose(found, wanted, atol=1e-5)


def test_only_the_networks_that_are_asked_are_moved_between_devices(pipe: HDDMPipeline) -> None:
    """An expert alone is the remedy where a whole ensemble does not fit."""
    ensemble = pipe.ensemble
    assert isinstance(ensemble.router, Router)
    experts = [one.network for one in ensemble.experts]
    whole, alone = EnsembleNetwork(ensemble, None), EnsembleNetwork(ensemble, 1)
    assert list(whole.parts) == [*experts, ensemble.router.network]
    assert list(alone.parts) == experts[1:]
    weights = [sum(one.nbytes for one in part.parameters()) for part in whole.parts]
    assert whole.size == sum(weights)
    assert alone.size == weights[1]


def test_all_weights_come_to_a_device_at_once(tmp_path: Path) -> None:
    folder = write_ensemble(tmp_path, [flow_expert(0), flow_expert(1)])
    ensemble = HDDMPipeline.from_pretrained(folder).ensemble
    network = EnsembleNetwork(ensemble, None)
    holders = [holder_of(one.network) for one in ensemble.experts]
    for is_there in (False, True):
        for holder in holders:
            assert holder is not None
            assert holder.shelf.is_present(holder) == is_there
        network.bring()


def test_a_copy_of_an_ensemble_has_weights_and_choices_of_its_own(tmp_path: Path) -> None:
    """A mix that has one ensemble twice, for two regions perhaps, copies its network."""
    folder = write_ensemble(tmp_path, [flow_expert(0), flow_expert(1)])

    def opened() -> Any:
        return HDDMPipeline.from_pretrained(folder).ensemble.under("draw")

    network = EnsembleNetwork(opened(), None, opened)
    x, at = torch.randn(6, 3, 4, 4), torch.full((6,), 500.0)
    with torch.no_grad():
        network.begin_sampling(SEED)
        wanted = network(x, at)
        twin = copy.deepcopy(network)
        assert twin._kept == {}
        assert not {*twin.modules()} & {*network.modules()}
        twin.begin_sampling(SEED)
        assert torch.equal(twin(x, at), wanted)


@pytest.mark.parametrize(
    ("needed", "there", "sizes"),
    [
        (5_200_000_000, 3_100_000_000, "need 5.20 GB on cuda:0, as a whole, and 3.10 GB are free"),
        (118_632, 118_631, "need 118.632 kB on cuda:0, as a whole, and 118.631 kB are free"),
    ],
)
def test_an_ensemble_that_does_not_fit_is_refused_in_one_line(
    needed: int, there: int, sizes: str
) -> None:
    check_room(needed, needed, "cuda:0")
    with pytest.raises(HddmError, match=f"Load hddm Ensemble: .* {sizes}; choose one") as error:
        check_room(needed, there, "cuda:0")
    assert "\n" not in str(error.value)


def test_a_folder_that_was_written_again_is_loaded_again(tmp_path: Path) -> None:
    def fingerprint(folder: object = tmp_path) -> str:
        return LoadEnsemble.IS_CHANGED(folder=str(folder), strategy="", expert=-1, batch_size=1)

    seen = [fingerprint(tmp_path / "missing")]

    def is_new() -> bool:
        found = fingerprint()
        assert found == fingerprint(f"'{tmp_path}' ")
        seen.append(found)
        return found not in seen[:-1]

    record = tmp_path / "ensemble.json"
    record.write_text("{}")
    assert is_new()
    assert not is_new()
    before = record.stat()
    record.write_text("[]")
    os.utime(record, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert is_new()
    (tmp_path / "experts").mkdir()
    weights = tmp_path / "experts" / "weights.safetensors"
    weights.write_bytes(b"1")
    assert is_new()
    weights.rename(tmp_path / "experts" / "others.safetensors")
    assert is_new()
    (tmp_path / "experts" / "gone").symlink_to(tmp_path / "nowhere")
    assert is_new()


@pytest.mark.parametrize("strategy", ["draw", "full", "commit-0.6"])
@pytest.mark.parametrize("branches", [[0, 1], [1, 0], [1], [0]])
def test_the_prompt_chooses_the_experts_of_all_branches_in_any_order(
    pipe: HDDMPipeline, strategy: str, branches: list[int]
) -> None:
    """ComfyUI asks for the branches together or apart, and where memory is short for the negative first."""
    x, labels = torch.randn(6, 3, 4, 4), {0: torch.tensor([2]), 1: torch.tensor([0])}
    reader = PromptReader(pipe)
    ((_, facts),) = reader.encode_from_tokens_scheduled("dog")
    prompt = {PREFIX + name: value for name, value in facts["hddm"].items()}
    network = EnsembleNetwork(pipe.ensemble.under(strategy), None)
    network.begin_sampling(SEED)
    for at in (0.8, 0.5):
        times = torch.full((6,), at)
        with torch.no_grad():
            network.plan(prompt, x, times, range(6))
            planned = torch.stack([network._planned[number] for number in range(6)])
            both = torch.cat([labels[branch].repeat(6) for branch in branches])
            found = network(
                x.repeat(len(branches), 1, 1, 1),
                1000 * times.repeat(len(branches)),
                transformer_options={"cond_or_uncond": branches},
                **{f"{PREFIX}class_labels": both},
            )
            for chunk, branch in zip(found.chunk(len(branches)), branches, strict=True):
                wanted = torch.zeros_like(x)
                for k, expert in enumerate(pipe.ensemble.experts):
                    own = expert.velocity(x, times.double(), class_labels=labels[branch].repeat(6))
                    wanted += planned[:, k].to(x).reshape(-1, 1, 1, 1) * own
                assert torch.allclose(chunk, wanted, atol=1e-4)


def test_pictures_are_decoded_to_rows_of_colours(pipe: HDDMPipeline) -> None:
    decoder = Decoder(pipe, 0)
    pictures = torch.rand(2, 4, 4, 3)
    assert torch.allclose(decoder.decode(decoder.encode(pictures)), pictures, atol=1e-6)


@pytest.mark.parametrize("strategy", ["draw", "commit-0.6"])
def test_pictures_that_are_asked_for_apart_keep_the_experts_that_they_have_together(
    pipe: HDDMPipeline, strategy: str
) -> None:
    """A mix asks an ensemble for the pictures that it drew for it, and later perhaps for fewer."""
    network = EnsembleNetwork(pipe.ensemble.under(strategy), None)
    x, at = torch.randn(6, 3, 4, 4), torch.full((6,), 500.0)
    with torch.no_grad():
        network.begin_sampling(SEED)
        together = network(x, at)
        network.begin_sampling(SEED)
        for rows in ([1, 4, 5], [0, 2], [4, 5]):
            found = network(x[rows], at[rows], transformer_options={ROWS: rows})
            assert torch.allclose(found, together[rows], atol=1e-6)


def test_a_colour_picture_is_grey_for_experts_of_one_channel(tmp_path: Path) -> None:
    folder = write_ensemble(
        tmp_path, [flow_expert(0, in_channels=1), flow_expert(1, in_channels=1)]
    )
    pipe = HDDMPipeline.from_pretrained(folder)
    pixels = torch.randint(256, (1, 4, 4, 3), dtype=torch.uint8)
    grey = np.asarray(Image.fromarray(pixels[0].numpy()).convert("L"), dtype=np.float32)
    found = Decoder(pipe, 0).encode(pixels / 255)
    assert found.shape == (1, 1, 4, 4)
    assert np.abs((found[0, 0].numpy() + 1) * 127.5 - grey).max() <= 1
    with pytest.raises(HddmError, match="prompt 'a cat': this model takes no prompts"):
        PromptReader(pipe).encode_from_tokens_scheduled("a cat")
    PromptReader(pipe).encode_from_tokens_scheduled("")


@pytest.mark.parametrize(
    ("folder", "strategy", "expert", "reason"),
    [
        ("", "", -1, "folder '': there is no such folder on ComfyUI's machine"),
        ("grown/of/someone", "", -1, "no such folder"),
        ("'{}'", "full", 0, "strategy 'full' and expert 0: one expert alone"),
        ("{}", "", 7, "expert 7: the experts of .* are 0 to 1"),
    ],
)
def test_what_the_loader_cannot_open_is_refused_before_it_loads(
    folder: str, strategy: str, expert: int, reason: str, tmp_path: Path
) -> None:
    there = write_ensemble(tmp_path, [flow_expert(0), flow_expert(1)])
    with pytest.raises(HddmError, match=reason):
        LoadEnsemble().load(folder.format(there), strategy, expert, 1)
