"""The example workflows of the node pack: in the form of ComfyUI's page, in API form, and as pictures.

    python -m benchmarks.comfyui.workflows COMFYUI

writes them to ``integrations/comfyui/example_workflows`` and ``docs/images``, with the declarations of nodes
that a running ComfyUI gives. `Step` says what a workflow contains.
"""

import json
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.comfyui.server import running
from integrations.comfyui.service import EXAMPLE

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "integrations" / "comfyui" / "example_workflows"
PICTURES = ROOT / "docs" / "images"
Api = dict[str, Any]
PROMPT = "a red sign"
THUMBNAIL = 640
"""Longer side of the picture of a template."""


@dataclass(frozen=True)
class Step:
    """A node of a workflow: inputs are values, or (name of a step, number of its output)."""

    kind: str
    column: int
    """From left to right, in the picture."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""


def _loader(title: str, file: str) -> Step:
    return Step("CheckpointLoaderSimple", 0, {"ckpt_name": file}, title)


def _sampled(batch: int = 1, seed: int = 5) -> dict[str, Step]:
    """The steps behind a mix, as in ComfyUI's own first workflow."""
    size = {"width": 512, "height": 512, "batch_size": batch}
    sampler = {"sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    links = {"positive": ("prompt", 0), "negative": ("negative", 0), "latent_image": ("size", 0)}
    inputs = {"model": ("mix", 0), **links, "seed": seed, "steps": 20, "cfg": 3.0, **sampler}
    return {
        "prompt": Step("CLIPTextEncode", 1, {"clip": ("a", 1), "text": PROMPT}, "Prompt"),
        "negative": Step("CLIPTextEncode", 1, {"clip": ("a", 1), "text": ""}, "Negative prompt"),
        "size": Step("EmptyLatentImage", 2, size),
        "sample": Step("KSampler", 3, inputs),
        "decode": Step("VAEDecode", 4, {"samples": ("sample", 0), "vae": ("a", 2)}),
        "save": Step("SaveImage", 4, {"images": ("decode", 0), "filename_prefix": "mixed"}),
    }


def _mix(**changes: Any) -> Step:
    inputs = {
        "model_1": ("a", 0),
        "model_2": ("b", 0),
        "weight_1": "1",
        "weight_2": "1",
        "way": "mix",
        "commit_at": 0.5,
        "cfg_1": 0.0,
        "cfg_2": 0.0,
    }
    return Step("HDDMMixModels", 2, {**inputs, **changes})


def _two() -> dict[str, Step]:
    return {
        "a": _loader("Model A", "model-a.safetensors"),
        "b": _loader("Model B", "model-b.safetensors"),
    }


def workflows() -> dict[str, dict[str, Step]]:
    """The examples, by name."""
    return {**mixes(), "ensemble": _ensemble(), "server": _server()}


NOTES = {
    "ensemble": "Write the folder of an ensemble or expert into Load hddm Ensemble. Its latent has the right "
    "size. A prompt is for models that take text or classes; leave it empty for others, and cfg at 1.",
    "server": "Start the service first: hddm serve ENSEMBLE. The first node makes pictures, the second one "
    "changes the right half of the first picture. A picture of your own comes from Load Image.",
}
"""What a user has to do first, by workflow."""
MIXED_NOTE = "Choose your two checkpoints in the loaders: two models of one latent format."


def mixes() -> dict[str, dict[str, Step]]:
    """Those of Mix Models."""
    own = {
        "prompt_b": Step("CLIPTextEncode", 1, {"clip": ("b", 1), "text": PROMPT}, "Prompt for B"),
        "negative_b": Step("CLIPTextEncode", 1, {"clip": ("b", 1), "text": ""}, "Negative for B"),
    }
    by_text = {"positive_2": ("prompt_b", 0), "negative_2": ("negative_b", 0), "cfg_2": 1.5}
    halves = {
        "nowhere": Step("SolidMask", 0, {"value": 0.0, "width": 512, "height": 512}),
        "half": Step("SolidMask", 0, {"value": 1.0, "width": 256, "height": 512}),
        "left": Step(
            "MaskComposite",
            1,
            {
                "destination": ("nowhere", 0),
                "source": ("half", 0),
                "x": 0,
                "y": 0,
                "operation": "add",
            },
            "Left half",
        ),
    }
    curves = {"weight_1": "0.7: 1, 0.4: 0", "weight_2": "0.7: 0, 0.4: 1"}
    return {
        "two-models": {**_two(), "mix": _mix(), **_sampled()},
        "composition-and-details": {**_two(), "mix": _mix(**curves), **_sampled()},
        "one-model-per-picture": {**_two(), "mix": _mix(way="draw"), **_sampled(batch=4)},
        "two-regions": {**_two(), **halves, "mix": _mix(mask_1=("left", 0)), **_sampled()},
        "two-text-encoders": {**_two(), **own, "mix": _mix(**by_text), **_sampled()},
    }


def _ensemble() -> dict[str, Step]:
    """An ensemble by hddm's own steps."""
    folder = {"folder": "path/of/an/ensemble", "strategy": "", "expert": -1, "batch_size": 4}
    links = {"positive": ("prompt", 0), "negative": ("negative", 0), "latent_image": ("a", 3)}
    how = {"sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    inputs = {"model": ("a", 0), **links, "seed": 5, "steps": 25, "cfg": 1.0, **how}
    return {
        "a": Step("HDDMLoadEnsemble", 0, folder),
        "prompt": Step("CLIPTextEncode", 1, {"clip": ("a", 1), "text": ""}, "Prompt or class"),
        "negative": Step("CLIPTextEncode", 1, {"clip": ("a", 1), "text": ""}, "No condition"),
        "sample": Step("KSampler", 2, inputs),
        "decode": Step("VAEDecode", 3, {"samples": ("sample", 0), "vae": ("a", 2)}),
        "save": Step("SaveImage", 4, {"images": ("decode", 0), "filename_prefix": "ensemble"}),
    }


def _server() -> dict[str, Step]:
    """Pictures of a service, and one of them with another right half."""
    asked = {"address": EXAMPLE, "prompt": "", "size": "auto", "n": 4, "guidance_scale": 1.0}
    asked |= {"strategy": "", "expert": "", "strength": 0.8}
    empty = {"value": 0.0, "width": 512, "height": 512}
    half = {"value": 1.0, "width": 256, "height": 512}
    beside = {"destination": ("nowhere", 0), "source": ("half", 0), "x": 256, "y": 0}
    edit = {**asked, "seed": 6, "image": ("one", 0), "mask": ("right", 0)}
    first = {"image": ("made", 0), "batch_index": 0, "length": 1}
    return {
        "made": Step("HDDMServer", 0, {**asked, "seed": 5}, "Pictures of the service"),
        "one": Step("ImageFromBatch", 1, first, "The first of them"),
        "save": Step("SaveImage", 1, {"images": ("made", 0), "filename_prefix": "served"}),
        "nowhere": Step("SolidMask", 0, empty, "Nowhere"),
        "half": Step("SolidMask", 1, half, "Half"),
        "right": Step("MaskComposite", 2, {**beside, "operation": "add"}, "Right half"),
        "edited": Step("HDDMServer", 3, edit, "Another right half"),
        "save_edited": Step("SaveImage", 4, {"images": ("edited", 0), "filename_prefix": "edited"}),
    }


def api_of(steps: Mapping[str, Step]) -> Api:
    """A workflow as ComfyUI's API takes it."""
    found = Api()
    for name, step in steps.items():
        inputs = {}
        for key, value in step.inputs.items():
            inputs[key] = list(value) if isinstance(value, tuple) else value
        found[name] = {"class_type": step.kind, "inputs": inputs}
    return found


WIDTH, GAP = 300, 60
NOTE = "Note"
"""A text on ComfyUI's page, of which its server knows nothing."""
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN")
"""Types of inputs that are typed in; those with a list of choices are as well."""


def page_of(steps: Mapping[str, Step], nodes: Mapping[str, Any], note: str) -> Api:
    """A workflow as ComfyUI's page saves it; ``nodes`` are the declarations of a running ComfyUI."""
    numbers = {name: k for k, name in enumerate(steps, 1)}
    links: list[list[Any]] = []
    shown: list[Api] = []
    heights = dict[int, int]()
    for name, step in steps.items():
        declared = nodes[step.kind]
        inputs, values = _slots(step, declared)
        outputs = []
        for slot, kind in enumerate(declared["output"]):
            outputs.append(
                {
                    "name": declared["output_name"][slot],
                    "type": kind,
                    "links": [],
                    "slot_index": slot,
                }
            )
        height = 60 + 22 * max(len(inputs), len(outputs)) + 26 * len(values)
        height += 60 if step.kind == "CLIPTextEncode" else 0
        top = heights.get(step.column, 60)
        heights[step.column] = top + height + GAP
        shown.append(
            {
                "id": numbers[name],
                "type": step.kind,
                "pos": [60 + step.column * (WIDTH + GAP), top],
                "size": [WIDTH, height],
                "flags": {},
                "order": numbers[name] - 1,
                "mode": 0,
                "inputs": inputs,
                "outputs": outputs,
                "properties": {"Node name for S&R": step.kind},
                "widgets_values": values,
                **({"title": step.title} if step.title else {}),
            }
        )
    by_number = {node["id"]: node for node in shown}
    for name, step in steps.items():
        target = by_number[numbers[name]]
        for slot, entry in enumerate(target["inputs"]):
            value = step.inputs.get(entry["name"])
            if not isinstance(value, tuple):
                continue
            source, output = by_number[numbers[value[0]]], value[1]
            link = len(links) + 1
            links.append([link, source["id"], output, target["id"], slot, entry["type"]])
            entry["link"] = link
            source["outputs"][output]["links"].append(link)
    shown.append(
        {
            "id": len(shown) + 1,
            "type": NOTE,
            "pos": [60, heights[0]],
            "size": [WIDTH, 160],
            "flags": {},
            "order": len(shown),
            "mode": 0,
            "inputs": [],
            "outputs": [],
            "title": "Before you run this",
            "properties": {},
            "widgets_values": [note],
        }
    )
    return {
        "last_node_id": len(shown),
        "last_link_id": len(links),
        "nodes": shown,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def _slots(step: Step, declared: Mapping[str, Any]) -> tuple[list[Api], list[Any]]:
    """Inputs with a link, and the values of widgets in their order."""
    inputs, values = list[Api](), list[Any]()
    for need in ("required", "optional"):
        for name, declaration in declared["input"].get(need, {}).items():
            kind = declaration[0]
            is_widget = isinstance(kind, list) or kind in WIDGETS
            if not is_widget:
                entry = {"name": name, "type": kind, "link": None}
                inputs.append(entry if need == "required" else {**entry, "shape": 7})
                continue
            default = declaration[1].get("default") if len(declaration) > 1 else None
            values.append(step.inputs.get(name, default))
            if name in ("seed", "noise_seed"):
                values.append("fixed")
    return inputs, values


def draw(page: Mapping[str, Any], nodes: Mapping[str, Any], path: Path) -> None:
    """A picture of a workflow, much as ComfyUI's page shows it."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    colours = {
        "MODEL": "#8f7bd6",
        "CLIP": "#d6b400",
        "VAE": "#e05555",
        "CONDITIONING": "#e08a2e",
        "LATENT": "#d65cc2",
        "IMAGE": "#4b8fd6",
        "MASK": "#4f9a4f",
    }
    right = max(node["pos"][0] + node["size"][0] for node in page["nodes"]) + 40
    bottom = max(node["pos"][1] + node["size"][1] for node in page["nodes"]) + 30
    figure, axes = plt.subplots(figsize=(right / 130, bottom / 130))
    axes.set_xlim(20, right)
    axes.set_ylim(bottom, 20)
    axes.set_axis_off()
    places = dict[tuple[int, str, int], tuple[float, float]]()
    for node in page["nodes"]:
        (x, y), (width, height) = node["pos"], node["size"]
        style = "round,pad=0,rounding_size=10"
        is_ours = node["type"].startswith("HDDM")
        ground = "#e6f0ff" if is_ours else "#f3f3f3"
        axes.add_patch(
            FancyBboxPatch((x, y), width, height, boxstyle=style, fc=ground, ec="#777777", lw=0.8)
        )
        title = node.get("title") or nodes[node["type"]]["display_name"]
        axes.text(x + 10, y + 20, title, fontsize=8, weight="bold", va="center")
        for kind, side in (("inputs", x), ("outputs", x + width)):
            for slot, entry in enumerate(node[kind]):
                at = (side, y + 46 + 22 * slot)
                places[node["id"], kind, slot] = at
                colour = colours.get(entry["type"], "#888888")
                is_linked = entry.get("link") is not None or entry.get("links")
                face = colour if is_linked else "white"
                axes.plot(*at, "o", ms=5, mfc=face, mec=colour, zorder=4)
                align = "left" if kind == "inputs" else "right"
                shift = 9 if kind == "inputs" else -9
                grey = "black" if is_linked else "#999999"
                words = {"fontsize": 6.5, "va": "center", "ha": align, "color": grey}
                axes.text(at[0] + shift, at[1], entry["name"], **words)
        top = y + 50 + 22 * max(len(node["inputs"]), len(node["outputs"]))
        if node["type"] == NOTE:
            text = textwrap.fill(node["widgets_values"][0], 37)
            axes.text(x + 14, y + 36, text, fontsize=6.5, va="top", color="#444444")
            continue
        for line, (name, value) in enumerate(_labelled(node, nodes[node["type"]])):
            at = top + 26 * line
            axes.text(x + 14, at, name, fontsize=6.5, va="center", color="#666666")
            shown = str(value) if str(value) else "(empty)"
            axes.text(x + width - 14, at, shown, fontsize=6.5, va="center", ha="right")
    for _, source, output, target, slot, kind in page["links"]:
        (x1, y1), (x2, y2) = places[source, "outputs", output], places[target, "inputs", slot]
        bend = max(40.0, abs(x2 - x1) / 2)
        curve = [(x1, y1), (x1 + bend, y1), (x2 - bend, y2), (x2, y2)]
        steps = [k / 30 for k in range(31)]
        xs, ys = zip(*(_bezier(curve, s) for s in steps), strict=True)
        axes.plot(xs, ys, "-", color=colours.get(kind, "#888888"), lw=1.6, zorder=0.5)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)


def _labelled(node: Mapping[str, Any], declared: Mapping[str, Any]) -> list[tuple[str, Any]]:
    names = list[str]()
    for need in ("required", "optional"):
        for name, declaration in declared["input"].get(need, {}).items():
            if isinstance(declaration[0], list) or declaration[0] in WIDGETS:
                names.append(name)
                if name == "seed":
                    names.append("after generating")
    return list(zip(names, node["widgets_values"], strict=True))


def _bezier(points: list[tuple[float, float]], s: float) -> tuple[float, float]:
    factors = [(1 - s) ** 3, 3 * s * (1 - s) ** 2, 3 * s**2 * (1 - s), s**3]
    x = sum(factor * point[0] for factor, point in zip(factors, points, strict=True))
    y = sum(factor * point[1] for factor, point in zip(factors, points, strict=True))
    return x, y


def main() -> None:
    """Write all examples."""
    with running(Path(sys.argv[1]), *sys.argv[2:3]) as comfy:
        nodes = comfy.get("/object_info")
    (EXAMPLES / "api").mkdir(parents=True, exist_ok=True)
    for name, steps in workflows().items():
        page = page_of(steps, nodes, NOTES.get(name, MIXED_NOTE))
        (EXAMPLES / f"{name}.json").write_text(json.dumps(page, indent=1) + "\n")
        (EXAMPLES / "api" / f"{name}.json").write_text(json.dumps(api_of(steps), indent=1) + "\n")
        picture = PICTURES / f"comfyui-{name}.png"
        draw(page, nodes, picture)
        # ComfyUI shows it in its list of templates.
        with Image.open(picture) as drawn:
            drawn.thumbnail((THUMBNAIL, THUMBNAIL))
            drawn.convert("RGB").save(EXAMPLES / f"{name}.jpg", quality=85)


if __name__ == "__main__":
    main()
