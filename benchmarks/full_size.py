"""Real shapes with random weights: convert, inspect, assemble and sample, beside diffusers doing the same.

``python -m benchmarks.full_size --model sd15 --model dit-xl``; every measurement is a process of its own, so
that its peak memory is its own. Times are those of the processor, since other work may slow the machine;
times on the clock are in the JSON. Memory is what no file holds: a mapped file's pages can be dropped at any
time. The network and its scheduler are at full size; a pipeline's text encoders and VAE are left out, since
hddm copies them as they are. Two experts take turns, and are mapped anew at each (`--offload disk`).
"""

import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from benchmarks.commands import Used, used_by
from benchmarks.harness import RESULTS, ResultsOption, Start, WorkOption, main
from hddm.utils.errors import HddmError

HDDM = Path(sys.executable).with_name("hddm")
SEED = 0
SD_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@dataclass(frozen=True)
class Model:
    """A diffusers network with the config of the real one, and what a call of it takes beside state and time.

    ``conditions`` are shapes per sample; labels are whole numbers.
    """

    network: str
    config: Mapping[str, Any]
    scheduler: str
    schedule: Mapping[str, Any]
    conditions: Mapping[str, tuple[int, ...]]
    dtype: str = "float32"
    side: int = 64


MODELS = {
    "sd15": Model(
        "UNet2DConditionModel",
        {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
        "DDIMScheduler",
        SD_BETAS,
        {"encoder_hidden_states": (77, 768)},
    ),
    "pixart-xl": Model(
        "PixArtTransformer2DModel",
        {
            "sample_size": 64,
            "caption_channels": 4096,
            "cross_attention_dim": 1152,
            "num_layers": 28,
        },
        "DPMSolverMultistepScheduler",
        {},
        {"encoder_hidden_states": (120, 4096)},
    ),
    "dit-xl": Model(
        "DiTTransformer2DModel",
        {"sample_size": 32, "num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72},
        "DDIMScheduler",
        {},
        {"class_labels": ()},
        side=32,
    ),
    "sdxl": Model(
        "UNet2DConditionModel",
        {
            "sample_size": 64,
            "block_out_channels": (320, 640, 1280),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2, 10),
            "attention_head_dim": (5, 10, 20),
            "cross_attention_dim": 2048,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
            "use_linear_projection": True,
        },
        "EulerDiscreteScheduler",
        SD_BETAS,
        {"encoder_hidden_states": (77, 2048), "text_embeds": (1280,), "time_ids": (6,)},
        "bfloat16",
    ),
    "sd3-medium": Model(
        "SD3Transformer2DModel",
        {
            "sample_size": 64,
            "in_channels": 16,
            "num_layers": 24,
            "num_attention_heads": 24,
            "caption_projection_dim": 1536,
            "pos_embed_max_size": 192,
            "dual_attention_layers": (),
        },
        "FlowMatchEulerDiscreteScheduler",
        {"shift": 3.0},
        {"encoder_hidden_states": (154, 4096), "pooled_projections": (2048,)},
        "bfloat16",
    ),
}
Name = StrEnum("Name", {one: one for one in MODELS})


def build(name: str, folder: Path) -> None:
    """Write a pipeline folder of random weights, with the conditions of one sample beside it."""
    import diffusers

    model, made = MODELS[name], torch.Generator().manual_seed(SEED)
    network = getattr(diffusers, model.network)(**model.config).to(getattr(torch, model.dtype))
    for key, one in network.named_parameters():
        # No weight is zero, so that every layer counts.
        one.data.normal_(mean=float("norm" in key and one.ndim == 1), std=0.02, generator=made)
    part = "unet" if "UNet" in model.network else "transformer"
    network.save_pretrained(folder / part, max_shard_size="20GB")
    getattr(diffusers, model.scheduler)(**model.schedule).save_pretrained(folder / "scheduler")
    index = {part: ["diffusers", model.network], "scheduler": ["diffusers", model.scheduler]}
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "DiffusionPipeline", **index})
    )
    save_file(conditions_of(model), folder / "conditions.safetensors")


def conditions_of(model: Model) -> dict[str, torch.Tensor]:
    """Random conditions of one sample."""
    made = torch.Generator().manual_seed(SEED)
    return {
        key: torch.tensor([1]) if key == "class_labels" else torch.randn(1, *shape, generator=made)
        for key, shape in model.conditions.items()
    }


def calls(name: str, number: int, **folders: Path) -> None:
    """Open the network of each folder, call them in turn, and print the processor's seconds of each call.

    A machine's speed changes from minute to minute, so only calls that follow one another can be compared.
    """
    opened = {
        way: (_stock if way == "diffusers" else _ours)(name, folder)
        for way, folder in folders.items()
    }
    with torch.inference_mode():
        for _ in range(number):
            for way, call in opened.items():
                began = time.process_time()
                call()
                print(f"{way} {time.process_time() - began}")


def _stock(name: str, folder: Path) -> Callable[[], object]:
    """A call of diffusers' network on one sample."""
    import diffusers

    model = MODELS[name]
    part = "unet" if "UNet" in model.network else "transformer"
    dtype = getattr(torch, model.dtype)
    network = getattr(diffusers, model.network).from_pretrained(folder / part, torch_dtype=dtype)
    given: dict[str, Any] = {
        key: one.to(dtype) if one.is_floating_point() else one
        for key, one in conditions_of(model).items()
    }
    added = {key: given.pop(key) for key in ("text_embeds", "time_ids") if key in given}
    if added or "PixArt" in model.network:
        given["added_cond_kwargs"] = added
    state = torch.randn(1, network.config.in_channels, model.side, model.side).to(dtype)
    return lambda: network(state, timestep=torch.tensor([500]), return_dict=False, **given)


def _ours(name: str, folder: Path) -> Callable[[], object]:
    """A velocity of an expert or an ensemble, whose experts take turns, on one sample."""
    import hddm

    model = MODELS[name]
    dtype = getattr(torch, model.dtype)
    waiting = {"offload": "disk"} if (folder / "ensemble.json").is_file() else {}
    opened, given = hddm.load(folder, dtype=dtype, **waiting), conditions_of(model)
    shape = opened.sample_shape
    assert shape is not None
    turns = itertools.cycle([{"expert": torch.tensor([k])} for k in (0, 1)])
    if not isinstance(opened, hddm.Ensemble):
        turns = itertools.repeat({})
    state = torch.randn(1, *shape).to(dtype)
    return lambda: opened.velocity(state, torch.tensor([0.5]), **next(turns), **given)


COPYING = """
import hashlib, pathlib, shutil, sys
shutil.copytree(sys.argv[1], sys.argv[2])
for path in pathlib.Path(sys.argv[1]).rglob("*.safetensors"):
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")
"""
"""Copies a folder and hashes its files, what a conversion does at least; it imports no library."""


def part_of(name: str, *arguments: object, **named: Path) -> Used:
    """Run one of this module's functions by its name, in a process of its own."""
    call = f"full_size.{name}(*{arguments}, **{named})"
    code = f"from pathlib import *; from benchmarks import full_size; {call}"
    return used_by(sys.executable, "-c", code)


def measure(name: str, work: Path, number: int, before: Path | None) -> dict[str, Any]:
    """All measurements of one model; its folders are deleted in the end.

    The network is called ``number`` times, or not at all. An older checkout, ``before``, converts too.
    """
    work.mkdir(parents=True, exist_ok=True)
    work = work.resolve()
    source, expert, both = work / "source", work / "expert", work / "both"
    if not source.exists():
        part_of("build", name, source)
    size = _bytes(source)
    row: dict[str, Any] = {"bytes": size}
    row["copy and hash"] = used_by(sys.executable, "-c", COPYING, source, work / "copy")
    shutil.rmtree(work / "copy")
    importing = f"import torch; from diffusers import {MODELS[name].network}"
    row["imports"] = used_by(sys.executable, "-c", importing)
    convert = (sys.executable, "-m", "hddm_cli", "convert", source, "--out")
    if before is not None:
        row["convert before"] = used_by(*convert, work / "before", checkout=before)
        shutil.rmtree(work / "before")
    row["convert"] = used_by(*convert, expert)
    row["inspect"] = used_by(HDDM, "inspect", expert)
    shutil.copytree(expert, work / "second", copy_function=os.link)
    members = (expert, work / "second", "--trust-components")
    row["assemble"] = used_by(HDDM, "assemble", *members, "--out", both)
    row["added by assembling"] = _bytes(work) - _bytes(source) - _bytes(expert)
    if number:
        folders = {"diffusers": source, "expert": expert, "two experts": both}
        for way, folder in folders.items():
            row[way] = part_of("calls", name, 2, **{way: folder})
        shown = part_of("calls", name, number, diffusers=source, expert=expert).said
        calls = map(str.split, shown.splitlines())
        row["calls"] = [(way, float(seconds)) for way, seconds in calls]
    shutil.rmtree(work)
    return row


def _bytes(folder: Path) -> int:
    """Bytes on disk; a file with several names counts once."""
    files = {(one.stat().st_ino, one.stat().st_size) for one in folder.rglob("*") if one.is_file()}
    return sum(size for _, size in files)


def table(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The measurements as a table, with the goals beside them."""
    yield "# Conversion and sampling at full size, random weights"
    yield ""
    yield (
        "Copying and hashing imports no library; a conversion needs torch and the network's class of "
        "diffusers, whose imports are a column of their own, and in brackets are the times of copying and "
        "hashing that it takes in all, and without these imports. Goals: the latter at most 2.5; peak memory "
        "that no file holds, beyond that of the imports, at most 0.5 GB; a call at most 1.05 times "
        "diffusers'; two experts within 1.2 times the memory of one. Times are of the processor; memory of "
        "samplers includes mapped files."
    )
    yield ""
    titles = [*CONVERSION, *(CALLS if any("calls" in row for row in rows.values()) else ())]
    yield f"| {' | '.join(titles)} |"
    yield f"|---|{'---:|' * (len(titles) - 1)}"
    for name, row in rows.items():
        cells = [name, *_conversion_cells(row), *(_call_cells(row) if "calls" in row else ())]
        yield f"| {' | '.join(cells)} |"


CONVERSION = (
    "model",
    "GB",
    "copy + sha256",
    "imports",
    "convert before",
    "convert (times)",
    "its peak (imports')",
    "with mapped files",
    "inspect",
    "assemble two",
)
CALLS = (
    "a call: diffusers",
    "ours (times)",
    "memory: diffusers",
    "one expert",
    "two (times one)",
)


def _conversion_cells(row: Mapping[str, Any]) -> list[str]:
    """Cells of `CONVERSION` but for the name."""
    hashed, imports, made = row["copy and hash"], row["imports"], row["convert"]
    before = row.get("convert before")
    in_all, beyond = made.cpu / hashed.cpu, (made.cpu - imports.cpu) / hashed.cpu
    return [
        f"{row['bytes'] / 1e9:.2f}",
        f"{hashed.cpu:.1f} s",
        f"{imports.cpu:.0f} s",
        "–" if before is None else f"{before.cpu:.0f} s, {before.anonymous / 1e9:.2f} GB",
        f"{made.cpu:.0f} s ({in_all:.1f}, {beyond:.1f})",
        f"{made.anonymous / 1e9:.2f} GB ({imports.anonymous / 1e9:.2f} GB)",
        f"{made.peak / 1e9:.2f} GB",
        f"{row['inspect'].cpu:.1f} s",
        f"{row['assemble'].cpu:.1f} s",
    ]


def _call_cells(row: Mapping[str, Any]) -> list[str]:
    """Cells of `CALLS`."""
    # The first call of each loads the weights.
    theirs, own = (
        [took for who, took in row["calls"] if who == way][1:] for way in ("diffusers", "expert")
    )
    times = sorted(b / a for a, b in zip(theirs, own, strict=True))
    memory = {way: row[way].peak for way in ("diffusers", "expert", "two experts")}
    return [
        f"{median(theirs):.2f} s",
        f"{median(own):.2f} s ({median(times):.2f}, {times[0]:.2f} to {times[-1]:.2f})",
        f"{memory['diffusers'] / 1e9:.2f} GB",
        f"{memory['expert'] / 1e9:.2f} GB",
        f"{memory['two experts'] / 1e9:.2f} GB ({memory['two experts'] / memory['expert']:.2f})",
    ]


app = typer.Typer(add_completion=False)


@app.command()
def full_size(
    model: Annotated[list[Name] | None, typer.Option("--model", help="Default: all.")] = None,
    number: Annotated[
        int,
        typer.Option("--calls", help="Calls of each network, in turn; the median counts. 0: none."),
    ] = 8,
    before: Annotated[
        Path | None, typer.Option(help="Older checkout, which converts in the same run.")
    ] = None,
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs"),
) -> None:
    """Measure conversion and sampling of real shapes; needs twice the model's size on disk and in memory."""
    if number == 1 or number < 0:
        raise HddmError(
            f"--calls {number}: is 0, or 2 or more, since the first one loads the weights"
        )
    start, rows = Start(results, work), {}
    for name in model or list(Name):
        typer.echo(f"{name} ...", err=True)
        rows[name.value] = measure(name.value, work / "full-size", number, before)
        typer.echo(list(table(rows))[-1], err=True)
    typer.echo(
        start.write(
            "full-size",
            list(table(rows)),
            {"rows": _plain(rows), "threads": torch.get_num_threads()},
        )
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return value.figures if isinstance(value, Used) else value


if __name__ == "__main__":
    main(app)
