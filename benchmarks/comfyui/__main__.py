"""hddm's nodes in a real ComfyUI: starts it, queues workflows over its API, and compares the pictures.

    COMFYUI=folder python -m benchmarks.comfyui [--python PYTHON] [--without-full-size]

``--python`` names the Python that has ComfyUI's requirements. The exit code is 1 if a check fails.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from benchmarks.comfyui import checks, ensemble_checks
from benchmarks.comfyui.checks import Pictures, Row
from benchmarks.comfyui.server import QueueError, running
from benchmarks.harness import RESULTS, Start
from benchmarks.reports import table
from hddm.utils.errors import HddmError

_FULL_SIZE = """
import sys, torch
sys.path.insert(0, ".")
import comfy.options
comfy.options.enable_args_parsing(False)
from comfy.cli_args import args
args.cpu = True
import comfy.ops
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from safetensors.torch import save_file
torch.manual_seed(0)
net = UNetModel(image_size=32, in_channels=4, out_channels=4, model_channels=320,
    num_res_blocks=[2, 2, 2, 2], channel_mult=[1, 2, 4, 4], num_heads=8, use_spatial_transformer=True,
    transformer_depth=[1, 1, 1, 1, 1, 1, 0, 0], transformer_depth_output=[1] * 9 + [0] * 3,
    transformer_depth_middle=1, context_dim=768, use_linear_in_transformer=False, legacy=False,
    dtype=torch.float16, operations=comfy.ops.manual_cast)
weights = {}
for name, weight in net.state_dict().items():
    if weight.ndim > 1:
        weights[name] = (torch.randn(weight.shape) / weight[0].numel() ** 0.5).half()
    else:
        weights[name] = torch.full(weight.shape, float(name.endswith("weight"))).half()
save_file(weights, sys.argv[1])
"""
"""A file with the names and shapes of Stable Diffusion 1.5's UNet, written by ComfyUI's own class."""


def main() -> None:
    """Run all checks, write the report, and say what failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--without-full-size", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if "COMFYUI" not in os.environ:
        raise HddmError(
            "set COMFYUI to the folder of a ComfyUI: COMFYUI=path python -m benchmarks.comfyui"
        )
    folder = Path(os.environ["COMFYUI"]).resolve()
    # Whoever ends this process ends ComfyUI with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    start = Start(results=options.results, command="COMFYUI=… python -m benchmarks.comfyui")
    sections = dict[str, list[Row]]()
    shown = dict[str, Any]()
    with running(folder, options.python) as comfy:
        system = comfy.get("/system_stats")["system"]
        pictures = Pictures(comfy)

        def keep(name: str, graph: Mapping[str, Any]) -> None:
            shown[name] = comfy.images_of(comfy.run(graph)["save"])

        todo = {
            "One model mixed with itself": checks.itself(pictures),
            "Models of one network": checks.from_one_network(pictures),
            "Exact denoisers, beside their sum in closed form": checks.in_closed_form(pictures),
            "One Gaussian mixture by two objectives": checks.one_mixture(pictures),
            "One model for each picture": checks.one_per_picture(pictures),
            "LoRAs of one checkpoint": checks.patches(pictures),
            "Memory": checks.memory(pictures),
            "Two prompts with guidance of their own": checks.by_two_prompts(pictures),
            "Regions of prompts": checks.regions_of_prompts(pictures),
            "Cancelled": checks.cancelled(pictures),
            "Example workflows": checks.examples(pictures, keep),
            "Refused": checks.refusals(pictures),
            # Loading an ensemble imports all of hddm.
            "The pack": checks.the_pack(comfy),
            "Ensembles": ensemble_checks.ensembles(pictures, comfy.base / "user"),
            "Example of an ensemble": ensemble_checks.example_of_an_ensemble(
                pictures, comfy.base / "user"
            ),
            "Example of a server": ensemble_checks.example_of_a_server(comfy, comfy.base / "user"),
        }
        for name, rows in todo.items():
            sections[name] = list(_told(rows))
        if not options.without_full_size:
            path = comfy.base / "models" / "diffusion_models" / "sd15-random.safetensors"
            subprocess.run([options.python, "-c", _FULL_SIZE, str(path)], cwd=folder, check=True)
            sections["A file of full size"] = list(_told(checks.full_size(pictures)))
    lines = _lines(system, sections)
    failed = [row.what for rows in sections.values() for row in rows if not row.is_met]
    content = {
        "comfyui": system["comfyui_version"],
        "checks": {
            name: [[row.what, row.found, row.is_met] for row in rows]
            for name, rows in sections.items()
        },
    }
    print(start.write("comfyui", lines, content, _figure(shown)))
    for what in failed:
        print(f"failed: {what}", file=sys.stderr)
    sys.exit(bool(failed))


def _told(rows: Iterator[Row]) -> Iterator[Row]:
    def until_refused() -> Iterator[Row]:
        try:
            yield from rows
        except QueueError as error:
            yield Row("the next workflow", str(error), False)

    for row in until_refused():
        print("met   " if row.is_met else "MISSED", row.what, "|", row.found, flush=True)
        yield row


def _lines(system: Mapping[str, Any], sections: Mapping[str, list[Row]]) -> list[str]:
    rows = [row for found in sections.values() for row in found]
    met = sum(row.is_met for row in rows)
    lines = [
        "# Mixing models in ComfyUI",
        "",
        f"ComfyUI {system['comfyui_version']} on its CPU, with PyTorch {system['pytorch_version']}. "
        f"{met} of {len(rows)} checks are met. Differences are the largest of all latents, beside the "
        "largest value. Test models are small: a UNet of ComfyUI's with random weights, and exact denoisers "
        "of Gaussians around drawn pictures. Both run in `comfy.model_base.BaseModel`, with ComfyUI's own "
        "`model_sampling` for noise (eps), v, flow and EDM.",
    ]
    for name, found in sections.items():
        words = [
            (row.what, row.found.replace("|", "\\|"), "met" if row.is_met else "missed")
            for row in found
        ]
        lines += ["", f"## {name}", "", *table(["check", "found", ""], words)]
    return lines


def _figure(shown: Mapping[str, list[Any]]) -> Any:
    count = sum(map(len, shown.values()))
    figure, axes = plt.subplots(1, count, figsize=(1.5 * count, 1.9))
    places = iter(axes)
    for name, pictures in shown.items():
        for number, picture in enumerate(pictures):
            place = next(places)
            place.imshow(picture)
            place.set_axis_off()
            place.set_title(name.replace("-", "\n") if number == 0 else "", fontsize=7)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    try:
        main()
    except HddmError as error:
        sys.exit(f"comfyui: {error}")
