"""What the nodes promise, checked in a running ComfyUI. Each check gives rows of the report."""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.comfyui.server import PACK, Comfy, QueueError, serving
from benchmarks.comfyui.workflows import Api, api_of, mixes, workflows
from hddm.pipelines.pipeline import HDDMPipeline
from tests.ensemble_files import flow_expert, write_ensemble

ROUNDING = 1e-3
"""Largest difference of two pictures that are the same to rounding, beside the picture's largest value.

Samplers add up rounding, and a network multiplies it: what one step of float32 changes grows to 1e-4.
"""
SAMPLERS = ("dpmpp_2m", "uni_pc", "euler_cfg_pp")


@dataclass(frozen=True)
class Row:
    """A line of the report."""

    what: str
    found: str
    is_met: bool


class Pictures:
    """Latents of graphs that were sampled in ComfyUI."""

    def __init__(self, comfy: Comfy) -> None:
        self._comfy, self._number = comfy, 0

    def of(self, graph: Api) -> Tensor:
        """Latents (batch, C, H, W) of the step "sample" of a graph in API form."""
        self._number += 1
        name = f"latents-{self._number}"
        kept = {key: node for key, node in graph.items() if key not in ("decode", "save")}
        saving = {"samples": ["sample", 0], "name": name}
        kept["keep"] = {"class_type": "HDDMTestSave", "inputs": saving}
        self._comfy.run(kept)
        path = self._comfy.base / "output" / f"{name}.pt"
        found: Tensor = torch.load(path)
        return found

    def error_of(self, graph: Api) -> str:
        """What a user reads who queues this graph, which must fail."""
        try:
            self.of(graph)
        except QueueError as error:
            return str(error)
        return "nothing was refused"


def model(network: str, objective: str, **changes: Any) -> Api:
    """A step that makes a test model."""
    settings = {"seed": 1, "latents": "SD15", "encoder": "one"}
    inputs = {"network": network, "objective": objective, **settings, **changes}
    return {"class_type": "HDDMTestModel", "inputs": inputs}


def blend(objective: str, **changes: Any) -> Api:
    """A step that makes the weighted sum of circles and squares in closed form."""
    weights = {"high": 1.0, "low": 0.0, "weight_high": 0.5, "weight_low": 0.5}
    inputs = {**weights, "cfg_circles": 1.0, "cfg_squares": 1.0, "is_halved": False}
    return {"class_type": "HDDMTestBlend", "inputs": {"objective": objective, **inputs, **changes}}


def mix(**changes: Any) -> Api:
    """A step that mixes the steps "a" and "b"."""
    inputs = {"model_1": ["a", 0], "model_2": ["b", 0], "weight_1": "1", "weight_2": "1"}
    inputs |= {"way": "mix", "commit_at": 0.5, "cfg_1": 0.0, "cfg_2": 0.0}
    return {"class_type": "HDDMMixModels", "inputs": {**inputs, **changes}}


def graph(sampled: str, parts: Mapping[str, Api], batch: int = 1, **changes: Any) -> Api:
    """A workflow that samples the model of the step ``sampled``; ``changes`` are of its sampler."""
    links = {"positive": ["prompt", 0], "negative": ["negative", 0], "latent_image": ["size", 0]}
    how = {"seed": 5, "steps": 5, "cfg": 3.0, "sampler_name": "euler", "scheduler": "normal"}
    inputs = {"model": [sampled, 0], **links, **how, "denoise": 1.0, **changes}
    size = {"width": 128, "height": 128, "batch_size": batch}
    text = {"class_type": "CLIPTextEncode", "inputs": {"clip": ["a", 1], "text": ""}}
    prompt = copy.deepcopy(text)
    prompt["inputs"]["text"] = "red"
    return {
        **parts,
        "prompt": prompt,
        "negative": text,
        "size": {"class_type": "EmptyLatentImage", "inputs": size},
        "sample": {"class_type": "KSampler", "inputs": inputs},
    }


def compared(what: str, found: Tensor, wanted: Tensor, bound: float = ROUNDING) -> Row:
    """Two pictures that must be the same."""
    error = float((found - wanted).abs().max() / wanted.abs().max())
    met = math.isfinite(error) and error <= bound
    return Row(what, f"{error:.1e} (bound {bound:.0e})", met)


def itself(pictures: Pictures) -> Iterator[Row]:
    """One model mixed with itself is the model alone."""
    for objective in ("eps", "v", "flow", "edm"):
        steps = {"a": model("unet", objective), "mix": mix(model_2=["a", 0], weight_2="2")}
        alone, twice = pictures.of(graph("a", steps)), pictures.of(graph("mix", steps))
        yield compared(f"{objective}, mixed with itself, beside it alone", twice, alone)
    steps = {"a": model("unet", "eps"), "mix": mix(model_2=["a", 0])}
    for name in SAMPLERS:
        how = {"sampler_name": name, "scheduler": "karras"}
        alone, twice = (
            pictures.of(graph("a", steps, **how)),
            pictures.of(graph("mix", steps, **how)),
        )
        yield compared(f"the same of eps by {name} on karras", twice, alone)


def from_one_network(pictures: Pictures) -> Iterator[Row]:
    """Models of several objectives, made from one network, give that network's picture."""
    for first, second in (("eps", "v"), ("v", "flow"), ("eps", "edm"), ("flow", "eps")):
        steps = {"a": model("unet", first), "b": model("unet", second), "mix": mix(weight_2="3")}
        # Beyond the ends of its schedule an epsilon model is asked at the end, and not at these levels.
        how = {"denoise": 0.8, "scheduler": "simple"} if first == "flow" else {}
        alone, both = pictures.of(graph("a", steps, **how)), pictures.of(graph("mix", steps, **how))
        yield compared(f"{first} with {second}, of one network, beside {first} alone", both, alone)


def in_closed_form(pictures: Pictures) -> Iterator[Row]:
    """Mixes of exact denoisers are the sum in closed form, sampled as one model."""
    curve = {"weight_1": "0.7: 1, 0.3: 0", "weight_2": "0.7: 0, 0.3: 1"}
    by_level = {"high": 0.7, "low": 0.3, "weight_high": 1.0, "weight_low": 0.0}
    cases: dict[str, tuple[Api, Api, float]] = {
        "weights 1 to 3": (
            {"weight_1": "1", "weight_2": "3"},
            {"weight_high": 0.25, "weight_low": 0.25},
            1.0,
        ),
        "weights by noise level": (curve, by_level, 1.0),
        "cfg 3 of the sampler": ({}, {"cfg_circles": 3.0, "cfg_squares": 3.0}, 3.0),
        "cfg 2 and 1 of their own": (
            {"cfg_1": 2.0, "cfg_2": 1.0},
            {"cfg_circles": 2.0, "cfg_squares": 1.0},
            3.0,
        ),
    }
    for objective, other in (("eps", "flow"), ("v", "eps")):
        for name, (settings, expected, cfg) in cases.items():
            steps = {
                "a": model("circles", objective),
                "b": model("squares", other),
                "blend": blend(objective, **expected),
                "mix": mix(**settings),
            }
            # The sum has its guidance inside.
            wanted = pictures.of(graph("blend", steps, cfg=1.0))
            found = pictures.of(graph("mix", steps, cfg=cfg))
            yield compared(f"circles by {objective} and squares by {other}: {name}", found, wanted)


def one_mixture(pictures: Pictures) -> Iterator[Row]:
    """Exact denoisers of one Gaussian mixture, by unlike objectives, mix to that mixture at any weights."""
    curve = {"weight_1": "0.8: 3, 0.2: 1", "weight_2": "0.8: 1, 0.2: 2"}
    for first, second in (("flow", "eps"), ("eps", "v"), ("v", "edm")):
        steps = {
            "a": model("circles", first),
            "b": model("circles", second),
            "mix": mix(**curve),
        }
        # Beyond the ends of its schedule an epsilon model is asked at the end, and not at these levels.
        how = {"denoise": 0.8, "scheduler": "simple"} if first == "flow" else {}
        alone = pictures.of(graph("a", steps, batch=4, cfg=1.0, **how))
        found = pictures.of(graph("mix", steps, batch=4, cfg=1.0, **how))
        yield compared(f"one mixture by {first} and by {second}: its own pictures", found, alone)


def one_per_picture(pictures: Pictures) -> Iterator[Row]:
    """Under draw and commit pictures come from one model each, as if it were alone."""
    steps = {"a": model("circles", "eps"), "b": model("squares", "v"), "mix": mix(way="draw")}
    steps["swapped"] = mix(model_1=["b", 0], model_2=["a", 0])
    alone_a = pictures.of(graph("a", steps, batch=6))
    alone_b = pictures.of(graph("b", steps, batch=6))
    found = pictures.of(graph("mix", steps, batch=6))
    again = pictures.of(graph("mix", steps, batch=6))
    wanted = _nearest(found, alone_a, alone_b)
    is_b = (wanted == alone_b).flatten(1).all(1)
    yield compared("draw: each of 6 pictures is that of one model alone", found, wanted)
    by_b = int(is_b.sum())
    yield Row("draw: both models make pictures", f"{by_b} of 6 by b", 0 < by_b < 6)
    yield compared("draw: the same seed draws the same models", again, found, bound=0)
    steps["mix"] = mix(way="commit", commit_at=1.0)
    committed = pictures.of(graph("mix", steps, batch=6))
    yield compared("commit at 1: as draw", committed, found)
    steps["mix"] = mix(way="commit", commit_at=0.01)
    committed = pictures.of(graph("mix", steps, batch=6))
    steps["mix"] = mix()
    yield compared("commit at 0.01: as mix", committed, pictures.of(graph("mix", steps, batch=6)))


def patches(pictures: Pictures) -> Iterator[Row]:
    """LoRAs of ComfyUI reach the model that they were loaded into, and no other."""
    lora = {"class_type": "HDDMTestLora", "inputs": {"model": ["a", 0], "seed": 1}}
    other = copy.deepcopy(lora)
    other["inputs"]["seed"] = 2
    steps = {"a": model("unet", "eps"), "one": lora, "two": other}
    plain, one = pictures.of(graph("a", steps)), pictures.of(graph("one", steps))
    two = pictures.of(graph("two", steps))
    apart = float((one - two).abs().max() / one.abs().max())
    yield Row("two LoRAs of one checkpoint differ", f"{apart:.2f}", apart > 0.05)
    for name, weights, wanted in (("first", ("1", "0"), one), ("second", ("0", "1"), two)):
        steps["mix"] = mix(
            model_1=["one", 0], model_2=["two", 0], weight_1=weights[0], weight_2=weights[1]
        )
        found = pictures.of(graph("mix", steps))
        yield compared(f"two LoRAs of one checkpoint, all weight on the {name}", found, wanted)
    yield compared(
        "afterwards the checkpoint alone is unchanged", pictures.of(graph("a", steps)), plain
    )


def refusals(pictures: Pictures) -> Iterator[Row]:
    """What does not go together is refused in one line."""
    eps, flow = model("unet", "eps"), model("unet", "flow")
    lora = {"class_type": "HDDMTestLora", "inputs": {"model": ["mix", 0], "seed": 1}}
    rescaled = {"class_type": "RescaleCFG", "inputs": {"model": ["c", 0], "multiplier": 0.7}}
    wide = model("squares", "v", encoder="other")
    perturbed = {"model": ["mix", 0], "scale": 3.0}
    late = {"class_type": "PerturbedAttentionGuidance", "inputs": perturbed}
    zeros = mix(weight_1="0.5: 1, 0.2: 0", weight_2="0")
    other = {"b": model("unet", "v", latents="SDXL"), "mix": mix()}
    cases: dict[str, tuple[Api, str, str]] = {
        "other latents": (other, "mix", "only models of one latent format"),
        "a text encoder of another width": ({"b": wide, "mix": mix()}, "mix", "texts of width"),
        "a curve that is none": ({"b": flow, "mix": mix(weight_1="1: a")}, "mix", "is no number"),
        "no weight at some level": ({"b": flow, "mix": zeros}, "mix", "are 0 at noise level 0"),
        "a LoRA behind the mix": (
            {"b": flow, "mix": mix(), "late": lora},
            "late",
            "put LoRA loaders in front",
        ),
        "patches of attention behind the mix": (
            {"b": flow, "mix": mix(), "late": late},
            "late",
            "would reach model 1 alone",
        ),
        "a change of guidance in model 2": (
            {"c": flow, "b": rescaled, "mix": mix()},
            "mix",
            "put that node behind Mix Models",
        ),
        "a mix of mixes": (
            {"b": flow, "c": mix(), "mix": mix(model_2=["c", 0])},
            "mix",
            "is a mix already",
        ),
    }
    for name, (steps, sampled, told) in cases.items():
        message = pictures.error_of(graph(sampled, {"a": eps, **steps}))
        yield Row(f"{name} is refused", message, told in message and "\n" not in message)


def with_test_models(steps: Api, objectives: tuple[str, str], encoder: str) -> Api:
    """An example with test models in place of checkpoints, and small pictures."""
    found = copy.deepcopy(steps)
    found["a"] = model("circles", objectives[0])
    found["b"] = model("squares", objectives[1], encoder=encoder)
    found["size"]["inputs"] |= {"width": 128, "height": 128}
    for node in found.values():
        if node["class_type"] == "SolidMask":
            node["inputs"]["width"] //= 4
            node["inputs"]["height"] //= 4
    return found


def examples(pictures: Pictures, keep: Callable[[str, Api], None]) -> Iterator[Row]:
    """The example workflows, with test models in place of checkpoints, beside the sum in closed form."""
    both = ("eps", "flow")
    by_level = {"high": 0.7, "low": 0.4, "weight_high": 1.0, "weight_low": 0.0}
    guided = {"cfg_circles": 3.0, "cfg_squares": 3.0}
    expected: dict[str, Api] = {
        "two-models": guided,
        "composition-and-details": {**by_level, **guided},
        "two-regions": {**guided, "is_halved": True},
        "two-text-encoders": {"cfg_circles": 3.0, "cfg_squares": 1.5},
    }
    for name, steps in mixes().items():
        encoder = "other" if name == "two-text-encoders" else "one"
        objectives = ("eps", "v") if name == "one-model-per-picture" else both
        made = with_test_models(api_of(steps), objectives, encoder)
        keep(name, made)
        found = pictures.of(made)
        if name == "one-model-per-picture":
            alone = []
            for one in "ab":
                single = copy.deepcopy(made)
                single["sample"]["inputs"]["model"] = [one, 0]
                alone.append(pictures.of(single))
            nearest = _nearest(found, alone[0], alone[1])
            yield compared(f"example {name}: each picture is that of one model", found, nearest)
            continue
        wanted = copy.deepcopy(made)
        wanted["mix"] = blend(objectives[0], **expected[name])
        wanted["sample"]["inputs"]["cfg"] = 1.0
        yield compared(f"example {name}, beside the sum in closed form", found, pictures.of(wanted))


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


def _nearest(found: Tensor, one: Tensor, other: Tensor) -> Tensor:
    is_other = (found - other).flatten(1).abs().amax(1) < (found - one).flatten(1).abs().amax(1)
    return torch.where(is_other[:, None, None, None], other, one)


def full_size(pictures: Pictures) -> Iterator[Row]:
    """A file of SD 1.5's UNet in float16, of random weights, through ComfyUI's own loader."""
    loader = {
        "class_type": "UNETLoader",
        "inputs": {"unet_name": "sd15-random.safetensors", "weight_dtype": "default"},
    }
    as_v = {
        "class_type": "ModelSamplingDiscrete",
        "inputs": {"model": ["c", 0], "sampling": "v_prediction", "zsnr": False},
    }
    text = model("circles", "eps", encoder="full")
    steps = {"a": text, "c": loader, "v": as_v, "twice": mix(model_1=["c", 0], model_2=["c", 0])}
    steps["mix"] = mix(model_1=["c", 0], model_2=["v", 0])
    how = {"batch": 1, "steps": 2}
    alone = pictures.of(graph("c", steps, **how))
    yield compared(
        "SD 1.5's UNet, mixed with itself", pictures.of(graph("twice", steps, **how)), alone, 1e-2
    )
    found = pictures.of(graph("mix", steps, **how))
    is_finite = bool(found.isfinite().all())
    yield Row("the same file as eps and as v, mixed", f"finite: {is_finite}", is_finite)


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
        nearest = _nearest(found, *alone)
        is_b = (nearest == alone[1]).flatten(1).all(1)
        yield compared(f"two ensembles by {way}: each picture is that of one alone", found, nearest)
        yield Row(
            f"two ensembles by {way}: both", f"{int(is_b.sum())} of 8", 0 < int(is_b.sum()) < 8
        )


def the_pack(comfy: Comfy) -> Iterator[Row]:
    """The copied folder brings its own hddm, and leaves ComfyUI's process as it was."""
    graph = {"facts": {"class_type": "HDDMTestModules", "inputs": {"name": "modules"}}}
    comfy.run(graph)
    facts = json.loads((comfy.base / "output" / "modules.json").read_text())
    is_own = facts["hddm"] == "vendor"
    yield Row("hddm is that of the copied folder", facts["hddm"], is_own)
    yield Row("diffusers is not imported", str(not facts["diffusers"]), not facts["diffusers"])
    templates = comfy.get("/workflow_templates").get(PACK, [])
    wanted = set(workflows())
    yield Row("ComfyUI offers the example workflows", f"{len(templates)}", set(templates) == wanted)
