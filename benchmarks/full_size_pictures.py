"""``python -m benchmarks.full_size_pictures``: memory and time of a picture of SDXL's shapes on a CPU.

One picture of 1024×1024 pixels in two steps, without guidance, by diffusers' pipeline, by the same with
slicing and tiling, and by hddm. Weights are random, and prompts are embedded already. Each way has a process
of its own, where weights are read, a picture is made, and the peak of the process is taken.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import diffusers
import torch
import typer

import hddm
from benchmarks.acceptance.memory import build, embedded
from benchmarks.harness import RESULTS, ResultsOption, Start, WorkOption, apart, main
from benchmarks.inference.memory import peak
from hddm.pipelines.pipeline import HDDMPipeline

STEPS = 2
WAYS = ("diffusers", "diffusers, slicing and tiling", "hddm", "hddm, in tiles")
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Picture:
    """Seconds of the whole, of the steps, and the peaks of resident and of own memory in bytes."""

    seconds: float
    resident: int
    own: int
    calls: int
    shape: tuple[int, ...]


@app.command()
def pictures(
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs/full-size-pictures"),
    threads: Annotated[int, typer.Option(help="Of torch.")] = 2,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny networks.")] = False,
) -> None:
    """Measure all ways, one after the other."""
    start = Start(results, work)
    side = 8 if quick else 128
    pipeline, expert = work / f"{dtype}-{side}" / "pipeline", work / f"{dtype}-{side}" / "expert"
    if not expert.exists():
        apart(threads, _prepare, pipeline, expert, side, dtype, not quick)
    found = {}
    for way in WAYS:
        if way.startswith("hddm"):
            made = apart(threads, by_hddm, expert, dtype, way.endswith("tiles"))
        else:
            made = apart(threads, by_diffusers, pipeline, dtype, way.endswith("tiling"))
        found[way] = made
        print(way, made, flush=True)
    lines = [
        f"# A picture of {8 * side}×{8 * side} pixels of SDXL's shapes",
        f"{STEPS} steps without guidance, {dtype}, random weights, without text encoders. Memory is the peak "
        "of the process, in all and without mapped files.",
        "",
        "| | calls | seconds | peak | without files |",
        "|---|---:|---:|---:|---:|",
    ]
    for way, one in found.items():
        memory = f"{one.resident / 1e9:.2f} GB | {one.own / 1e9:.2f} GB"
        lines.append(f"| {way} | {one.calls} | {one.seconds:.1f} | {memory} |")
    content: dict[str, Any] = {"threads": threads, "dtype": dtype}
    content["ways"] = {way: vars(one) for way, one in found.items()}
    typer.echo(start.write("full-size-pictures", lines, content))


def _prepare(pipeline: Path, expert: Path, side: int, dtype: str, is_real: bool) -> None:
    build(pipeline, side, getattr(torch, dtype), is_real)
    hddm.convert(pipeline, expert, verify=False)


def by_diffusers(folder: Path, dtype: str, is_tiled: bool) -> Picture:
    """By StableDiffusionXLPipeline."""
    number_type = getattr(torch, dtype)
    given = embedded(number_type, "cpu")
    names = ("prompt_embeds", "pooled_prompt_embeds")

    def made() -> Any:
        parts = {
            "unet": diffusers.UNet2DConditionModel.from_pretrained(
                folder / "unet", torch_dtype=number_type
            ),
            "vae": diffusers.AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=number_type),
            "scheduler": diffusers.EulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        }
        absent = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
        pipe = diffusers.StableDiffusionXLPipeline(**parts, **absent, add_watermarker=False)
        pipe.set_progress_bar_config(disable=True)
        if is_tiled:
            pipe.vae.enable_slicing()
            pipe.vae.enable_tiling()
        return pipe

    def call(pipe: Any) -> Any:
        own = {name: given[name] for name in names}
        options = {"guidance_scale": 1.0, "num_inference_steps": STEPS, "output_type": "np"}
        return pipe(**own, **options, generator=torch.Generator().manual_seed(0)).images

    return _measured(made, call, lambda pipe: pipe.unet)


def by_hddm(folder: Path, dtype: str, is_tiled: bool) -> Picture:
    """By HDDMPipeline; in tiles also where it would decode the picture at once."""
    number_type = getattr(torch, dtype)
    given = embedded(number_type, "cpu")
    conditions = {
        "encoder_hidden_states": given["prompt_embeds"],
        "text_embeds": given["pooled_prompt_embeds"],
    }

    def made() -> Any:
        pipe = HDDMPipeline.from_pretrained(folder, dtype=number_type)
        pipe.set_progress_bar_config(disable=True)
        if is_tiled:
            pipe.vae.enable_tiling()
        return pipe

    def call(pipe: Any) -> Any:
        options = {"num_inference_steps": STEPS, "solver": "euler", "output_type": "np"}
        return pipe(conditions=conditions, seed=0, **options).images

    def network(pipe: Any) -> Any:
        own = pipe.ensemble.experts[0].network
        return getattr(own, "network", own)

    return _measured(made, call, network)


def _measured(made: partial[Any] | Any, call: Any, network: Any) -> Picture:
    calls: list[int] = []
    with peak("cpu") as found:
        began = time.perf_counter()
        pipe = made()
        network(pipe).register_forward_hook(lambda *_: calls.append(1))
        images = call(pipe)
        seconds = time.perf_counter() - began
    return Picture(seconds, found[0], found[1], len(calls), tuple(images.shape))


if __name__ == "__main__":
    main(app)
