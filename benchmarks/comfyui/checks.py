"""What the nodes promise, checked in a running ComfyUI. Each check gives rows of the report.

What those for hddm's own models promise is in `benchmarks.comfyui.ensemble_checks`.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.comfyui.server import PACK, Comfy, QueueError
from benchmarks.comfyui.workflows import Api, api_of, mixes, workflows

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
        found: Tensor = torch.load(self._output("HDDMTestSave", graph, "pt"))
        return found

    def loads_of(self, graph: Api) -> Api:
        """What ComfyUI loaded for a graph, and the memory that it made free for each sampling."""
        found: Api = json.loads(self._output("HDDMTestLoads", graph, "json").read_text())
        return found

    def _output(self, kind: str, graph: Api, suffix: str) -> Path:
        """The file that a node of this kind writes of the step "sample" of a graph."""
        self._number += 1
        name = f"kept-{self._number}"
        kept = {key: node for key, node in graph.items() if key not in ("decode", "save")}
        kept["keep"] = {"class_type": kind, "inputs": {"samples": ["sample", 0], "name": name}}
        self._comfy.run(kept)
        return self._comfy.base / "output" / f"{name}.{suffix}"

    def told_by(self, kind: str, steps: Api) -> Api:
        """What a node of this kind tells about the model of the step "a"."""
        self._number += 1
        inputs = {"model": ["a", 0], "name": f"told-{self._number}"}
        self._comfy.run({**steps, "keep": {"class_type": kind, "inputs": inputs}})
        path = self._comfy.base / "output" / f"{inputs['name']}.json"
        found: Api = json.loads(path.read_text())
        return found

    def cancelled_in(self, graph: Api, started: str) -> str:
        """The node in which a graph was cancelled, once there was a file ``started``."""
        return self._comfy.cancel(graph, self._comfy.base / "output" / started)

    def error_of(self, graph: Api) -> str:
        """What a user reads who queues this graph, which must fail."""
        try:
            if "sample" in graph:
                self.of(graph)
            else:
                self._comfy.run(graph)
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
    wanted = nearest_of(found, alone_a, alone_b)
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


def by_two_prompts(pictures: Pictures) -> Iterator[Row]:
    """Dual CFG, which asks for three conditionings, guides a mix as it guides one model."""
    steps = {"a": model("circles", "eps"), "b": model("squares", "flow")}
    steps |= {"mix": mix(weight_2="3"), "blend": blend("eps", weight_high=0.25, weight_low=0.25)}
    for style in ("regular", "nested"):
        found, wanted = (pictures.of(_dual(one, steps, style)) for one in ("mix", "blend"))
        yield compared(f"Dual CFG, {style}, of a mix, beside the sum in closed form", found, wanted)
    steps["mix"] = mix(cfg_2=2.0)
    message = pictures.error_of(_dual("mix", steps, "regular"))
    is_told = "has a cfg of its own" in message and "\n" not in message
    yield Row("Dual CFG of a mix with cfg of its own is refused", message, is_told)


def _dual(sampled: str, steps: Mapping[str, Api], style: str) -> Api:
    """A workflow that samples a model by two prompts, with guidance scales of their own."""
    made = graph(sampled, steps)
    text = copy.deepcopy(made["prompt"])
    text["inputs"]["text"] = "green"
    links = {"model": [sampled, 0], "cond1": ["prompt", 0], "cond2": ["second", 0]}
    guidance = {"negative": ["negative", 0], "cfg_conds": 3.0, "cfg_cond2_negative": 2.0}
    schedule = {"scheduler": "normal", "steps": 5, "denoise": 1.0}
    parts = {
        "noise": ("RandomNoise", {"noise_seed": 5}),
        "guider": ("DualCFGGuider", {**links, **guidance, "style": style}),
        "sampler": ("KSamplerSelect", {"sampler_name": "euler"}),
        "sigmas": ("BasicScheduler", {"model": [sampled, 0], **schedule}),
    }
    inputs = {name: [name, 0] for name in parts} | {"latent_image": ["size", 0]}
    parts["sample"] = ("SamplerCustomAdvanced", inputs)
    for name, (kind, given) in parts.items():
        made[name] = {"class_type": kind, "inputs": given}
    return {**made, "second": text}


def regions_of_prompts(pictures: Pictures) -> Iterator[Row]:
    """Conditionings with a mask or an area reach the model that draws a picture as if it were alone."""
    left = {"value": 1.0, "width": 64, "height": 128}
    nowhere = {"value": 0.0, "width": 128, "height": 128}
    added = {"destination": ["nowhere", 0], "source": ["half", 0], "x": 0, "y": 0}
    where = {"conditioning": ["prompt", 0], "strength": 1.0}
    masked = {**where, "mask": ["left", 0], "set_cond_area": "default"}
    area = {**where, "width": 64, "height": 128, "x": 0, "y": 0}
    masks = {
        "nowhere": {"class_type": "SolidMask", "inputs": nowhere},
        "half": {"class_type": "SolidMask", "inputs": left},
        "left": {"class_type": "MaskComposite", "inputs": {**added, "operation": "add"}},
    }
    both = {"conditioning_1": ["there", 0], "conditioning_2": ["second", 0]}
    for kind, inputs in (("ConditioningSetMask", masked), ("ConditioningSetArea", area)):
        steps = {"a": model("unet", "eps"), "b": model("unet", "v", seed=2), **masks}
        steps |= {"mix": mix(way="draw"), "there": {"class_type": kind, "inputs": inputs}}
        steps["both"] = {"class_type": "ConditioningCombine", "inputs": both}
        made = []
        for sampled in ("a", "b", "mix"):
            one = graph(sampled, steps, batch=6)
            one["sample"]["inputs"]["positive"] = ["both", 0]
            one["second"] = copy.deepcopy(one["prompt"])
            one["second"]["inputs"]["text"] = "green"
            made.append(pictures.of(one))
        nearest = nearest_of(made[2], made[0], made[1])
        yield compared(f"draw, with {kind}: each picture is that of one model", made[2], nearest)


def cancelled(pictures: Pictures) -> Iterator[Row]:
    """A mix that was cancelled samples as one that never was."""
    steps = {"a": model("circles", "eps"), "b": model("squares", "flow")}
    started = {"model": ["mix", 0], "name": "started"}
    steps["seen"] = {"class_type": "HDDMTestStarted", "inputs": started}
    for way in ("mix", "draw"):
        steps["mix"] = mix(way=way)
        started["name"] = f"started-{way}"
        made = graph("seen", steps, batch=6)
        before = pictures.of(graph("mix", steps, batch=6))
        long = graph("seen", steps, batch=6, steps=10_000)
        long["keep"] = {"class_type": "PreviewAny", "inputs": {"source": ["sample", 0]}}
        node = pictures.cancelled_in(long, started["name"])
        yield Row(f"{way}: cancelled while it samples", node, node == "KSampler")
        what = f"{way}: the same mix after it was cancelled"
        yield compared(what, pictures.of(made), before, bound=0)


def memory(pictures: Pictures) -> Iterator[Row]:
    """ComfyUI frees what the most demanding model works in, and loads nothing twice."""
    steps = {"a": model("circles", "eps"), "b": model("unet", "v")}
    steps |= {"mix": mix(), "swapped": mix(model_1=["b", 0], model_2=["a", 0])}

    def asked_for(made: Api) -> float:
        return float(pictures.loads_of(made)["asked"][-1])

    small, large = (asked_for(graph(one, steps)) for one in "ab")
    for name in ("mix", "swapped"):
        found = asked_for(graph(name, steps))
        told = f"{found / 2**20:.1f} MiB, as {large / 2**20:.1f} and not {small / 2**20:.1f}"
        yield Row(f"memory of the larger model: {name}", told, found == large > small)
    made = graph("mix", steps)
    control = {"conditioning": ["prompt", 0], "size": 2**30}
    made["there"] = {"class_type": "HDDMTestControl", "inputs": control}
    made["mix"]["inputs"] |= {"positive_2": ["there", 0], "negative_2": ["negative", 0]}
    found = asked_for(made)
    told = f"{(found - large) / 2**20:.1f} MiB more"
    yield Row("memory of a ControlNet of model 2 (1024 MiB)", told, found == large + 2**30)

    unet = {"a": model("unet", "eps")}
    for name, seed in (("one", 1), ("two", 2)):
        lora = {"model": ["a", 0], "seed": seed}
        unet[name] = {"class_type": "HDDMTestLora", "inputs": lora}
    links = {"model_1": ["one", 0], "model_2": ["two", 0]}
    unet["mix"] = mix(**links)
    first = pictures.of(graph("mix", unet))
    pictures.loads_of(graph("mix", unet))
    unet["mix"] = mix(**links, weight_2="2")
    loads = pictures.loads_of(graph("mix", unet))
    told = f"{loads['loads']} loads, {loads['unloads']} times all unloaded"
    is_kept = loads["loads"] == 0 and loads["unloads"] == 0 and len(loads["asked"]) == 1
    yield Row("two LoRAs of one checkpoint, mixed by another weight", told, is_kept)
    unet["mix"] = mix(**links)
    again = pictures.of(graph("mix", unet))
    yield compared("and by the first weight again", again, first, bound=0)


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
            nearest = nearest_of(found, alone[0], alone[1])
            yield compared(f"example {name}: each picture is that of one model", found, nearest)
            continue
        wanted = copy.deepcopy(made)
        wanted["mix"] = blend(objectives[0], **expected[name])
        wanted["sample"]["inputs"]["cfg"] = 1.0
        yield compared(f"example {name}, beside the sum in closed form", found, pictures.of(wanted))


def nearest_of(found: Tensor, one: Tensor, other: Tensor) -> Tensor:
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
