"""Files of hddm that a verb enters: `python -m benchmarks.files_entered`, about a minute on two cores.

A file counts once a function of it is called. What runs while a module is imported does not count. Each verb
runs in a process of its own, on small real inputs that the library makes in a temporary folder.
"""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler, DiTTransformer2DModel
from PIL import Image

import hddm
from hddm_cli.app import app

LIBRARY = Path(hddm.__file__).parent
SHORT = ("--steps", "4", "--batch-size", "8", "--size", "tiny", "--seed", "0")
TARGETS = {"sample": 22, "train expert": 20, "convert": 12}


def write_images(folder: Path, num: int = 24, side: int = 8) -> Path:
    """Gray images of two kinds, ``folder/<class>/<n>.png``."""
    draws = np.random.default_rng(0)
    for name, axis in (("columns", 1), ("rows", 0)):
        (folder / name).mkdir(parents=True)
        for index in range(num):
            image = draws.integers(0, 60, (side, side)).astype(np.uint8)
            image[(slice(None), slice(3, 5))[:: 1 if axis else -1]] += 190
            Image.fromarray(image).save(folder / name / f"{index:02d}.png")
    return folder


def write_pipeline(folder: Path) -> Path:
    """A class-conditional DiT with its scheduler, as diffusers writes it."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8}
    DiTTransformer2DModel(**sizes, num_embeds_ada_norm=5, out_channels=8).save_pretrained(
        folder / "transformer"
    )
    DDIMScheduler().save_pretrained(folder / "scheduler")
    parts = {
        "transformer": ["diffusers", "DiTTransformer2DModel"],
        "scheduler": ["diffusers", "DDIMScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline", **parts}))
    return folder


def entered(*arguments: object) -> list[str]:
    """Files of the library that ``hddm`` enters with these arguments, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.files_entered", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"hddm {' '.join(map(str, arguments))}: {done.stderr[-2000:]}")
    files: list[str] = json.loads(done.stdout.splitlines()[-1])
    return files


class Count:
    """A profile function that notes the files of the calls that no import makes."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._imports = threading.local()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code, here = frame.f_code, self._imports.__dict__
        if event == "call":
            if code.co_name == "<module>":
                here["depth"] = here.get("depth", 0) + 1
            elif not here.get("depth") and code.co_filename.startswith(str(LIBRARY)):
                self.files.add(str(Path(code.co_filename).relative_to(LIBRARY)))
        elif event == "return" and code.co_name == "<module>":
            here["depth"] -= 1


def measure(arguments: list[str]) -> None:
    """Run ``hddm`` in this process; print the files as a line of JSON and exit as it does."""
    count = Count()
    sys.argv = ["hddm", *arguments]
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        app()
    finally:
        sys.setprofile(None)
        print(json.dumps(sorted(count.files)))


def main() -> None:
    """Make the inputs, count for each verb, and print the files."""
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards, experts = folder / "shards", [folder / f"expert_{k}" for k in range(2)]
        entered("partition", write_images(folder / "images"), "--out", shards, "--shards", 2)
        found = {}
        for k, (expert, objective) in enumerate(zip(experts, ("ddpm", "flow"), strict=True)):
            found["train expert"] = entered(
                "train",
                "expert",
                shards / f"shard_{k}",
                "--out",
                expert,
                "--objective",
                objective,
                *SHORT,
            )
        entered("train", "router", shards, "--out", folder / "router", *SHORT)
        ensemble = (
            "--router",
            folder / "router",
            "--strategy",
            "top-1",
            "--out",
            folder / "ensemble",
        )
        entered("assemble", *experts, *ensemble)
        found["sample"] = entered(
            "sample",
            folder / "ensemble",
            "--out",
            folder / "samples",
            "--num-images",
            4,
            "--steps",
            4,
        )
        found["convert"] = entered(
            "convert", write_pipeline(folder / "pipeline"), "--out", folder / "converted"
        )
    for verb, files in found.items():
        print(f"hddm {verb}: {len(files)} files (target {TARGETS[verb]})")
        print("".join(f"    {file}\n" for file in files), end="")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1:])
    else:
        main()
