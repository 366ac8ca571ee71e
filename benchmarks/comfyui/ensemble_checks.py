"""What the nodes for hddm's own models promise, checked in a running ComfyUI."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.comfyui.checks import Pictures, Row, compared, graph, mix, nearest_of
from benchmarks.comfyui.server import Comfy, serving
from benchmarks.comfyui.workflows import Api, api_of, workflows
from hddm.pipelines.pipeline import HDDMPipeline
from tests.ensemble_files import flow_expert, write_ensemble


def example_of_an_ensemble(pictures: Pictures, folder: Path) -> Iterator[Row]:
    """The example of Load hddm Ensemble gives the pictures of hddm's own pipeline, from the same noise."""
    path = write_ensemble(folder / "example", [flow_expert(seed) for seed in range(2)])
    made = api_of(workflows()["ensemble"])
    made["a"]["inputs"]["folder"] = str(path)
    wanted = _by_hddm(path, made["sample"]["inputs"]["steps"])
    yield compared("example ensemble, beside hddm's pipeline", pictures.of(made), wanted)


def example_of_a_server(comfy: Comfy, folder: Path) -> Iterator[Row]:
    """The example of hddm Server, with a real service: what the mask leaves free stays as it is."""
    path = write_ensemble(folder / "served", [flow_expert(seed) for seed in range(2)])
    with serving(path) as address:
        made = api_of(workflows()["server"])
        for node in made.values():
            if node["class_type"] == "HDDMServer":
                node["inputs"]["address"] = address
        outputs = comfy.run(made)
    first, *_ = comfy.images_of(outputs["save"])
    edited = comfy.images_of(outputs["save_edited"])
    yield Row("example server: pictures", f"{len(edited)}", len(edited) == 4)
    half = first.shape[1] // 2
    kept = max(int(np.abs(one[:, :half] - first[:, :half]).max()) for one in edited)
    changed = min(int(np.abs(one[:, half:] - first[:, half:]).max()) for one in edited)
    yield Row("example server: the left half stays", f"off by {kept} of 255", kept <= 1)
    yield Row(
        "example server: the right half changes", f"by {changed} of 255 at least", changed > 1
    )


def ensembles(pictures: Pictures, folder: Path) -> Iterator[Row]:
    """An ensemble of hddm, sampled by ComfyUI from the same noise as by hddm's own pipeline."""
    path = write_ensemble(folder, [flow_expert(seed, num_classes=3) for seed in range(2)])
    for strategy, text, cfg in (
        ("draw", "cat", 2.0),
        ("full", "", 1.0),
        ("commit-0.6", "dog", 2.0),
    ):
        loader = {"folder": str(path), "strategy": strategy, "expert": -1, "batch_size": 4}
        steps = {"a": {"class_type": "HDDMLoadEnsemble", "inputs": loader}}
        made = graph("a", steps, cfg=cfg, steps=4, scheduler="simple", latent_image=["a", 3])
        made["prompt"]["inputs"]["text"] = text
        asked: Api = {"prompt": text} if text else {}
        wanted = _by_hddm(path, 4, **asked, guidance_scale=cfg, strategy=strategy)
        what = f"an ensemble under {strategy}, {text or 'no prompt'}, cfg {cfg:g}, beside hddm's pipeline"
        yield compared(what, pictures.of(made), wanted)
    yield from _mixed_ensembles(pictures, folder)
    yield from _room(pictures, path)


def _room(pictures: Pictures, path: Path) -> Iterator[Row]:
    """An ensemble is loaded as a whole or not at all, and again after its folder changed."""
    loader = {"folder": str(path), "strategy": "draw", "expert": -1, "batch_size": 1}
    steps = {"a": {"class_type": "HDDMLoadEnsemble", "inputs": loader}}
    facts = pictures.told_by("HDDMTestWhole", steps)
    ensemble = HDDMPipeline.from_pretrained(path).ensemble
    networks = [*(one.network for one in ensemble.experts), ensemble.router.network]
    size = 0
    for network in networks:
        size += sum(one.nbytes for one in network.parameters())
    is_whole = facts == {"size": size, "loaded": size, "freed": 0, "left": size}
    yield Row("an ensemble is loaded as a whole", f"{facts}", is_whole)
    tight = {"class_type": "HDDMTestRoom", "inputs": {"model": ["a", 0], "free": size - 1}}
    message = pictures.error_of({**steps, "keep": tight})
    is_told = "on cuda:0, as a whole, and" in message and "\n" not in message
    yield Row("an ensemble that does not fit is refused", message, is_told)


def _by_hddm(path: Path, steps: int, **asked: Any) -> Tensor:
    """Four latents of hddm's pipeline by Euler's method, from the noise that ComfyUI has with seed 5."""
    pipe = HDDMPipeline.from_pretrained(path)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn((4, *pipe.ensemble.sample_shape), generator=torch.manual_seed(5))
    how: Api = {"num_inference_steps": steps, "solver": "euler", "output_type": "latent"}
    found: Tensor = pipe(num_images_per_prompt=4, seed=5, latents=noise, **how, **asked).images
    return found


def _mixed_ensembles(pictures: Pictures, folder: Path) -> Iterator[Row]:
    """Two ensembles in one mix: each picture has the model, and in it the expert, that it has alone."""
    steps: Api = {}
    for name, seeds in (("a", (0, 1)), ("b", (2, 3))):
        path = write_ensemble(folder / name, [flow_expert(seed) for seed in seeds])
        loader = {"folder": str(path), "strategy": "draw", "expert": -1, "batch_size": 8}
        steps[name] = {"class_type": "HDDMLoadEnsemble", "inputs": loader}
    how = {"cfg": 1.0, "steps": 4, "scheduler": "simple", "latent_image": ["a", 3]}
    texts = {
        name: {"class_type": "CLIPTextEncode", "inputs": {"clip": ["a", 1], "text": ""}}
        for name in ("prompt", "negative")
    }
    alone = [pictures.of({**graph(one, steps, **how), **texts}) for one in "ab"]
    for way in ("draw", "commit"):
        # At level 1 a commit is a draw, by the same coin.
        steps["mix"] = mix(way=way, commit_at=1.0)
        found = pictures.of({**graph("mix", steps, **how), **texts})
        nearest = nearest_of(found, *alone)
        is_b = (nearest == alone[1]).flatten(1).all(1)
        yield compared(f"two ensembles by {way}: each picture is that of one alone", found, nearest)
        yield Row(
            f"two ensembles by {way}: both", f"{int(is_b.sum())} of 8", 0 < int(is_b.sum()) < 8
        )
    steps["mix"] = mix(model_2=["a", 0])
    found = pictures.of({**graph("mix", steps, **how), **texts})
    yield compared("an ensemble mixed with itself, beside it alone", found, alone[0])
    # The same folder, written again with other weights, while ComfyUI has the nodes' outputs in its cache.
    (folder / "a").rename(folder / "former")
    write_ensemble(folder / "a", [flow_expert(seed) for seed in (4, 5)])
    changed = pictures.of({**graph("a", steps, **how), **texts})
    apart = float((changed - alone[0]).abs().max() / alone[0].abs().max())
    yield Row("an ensemble written again is loaded again", f"{apart:.2f} apart", apart > 0.05)
