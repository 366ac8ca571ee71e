"""``python -m benchmarks.serving``: see ``--help``."""

import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import typer

import hddm
from benchmarks.harness import RESULTS, QuickOption, ResultsOption, Start, main
from benchmarks.inference.models import Size, random_expert
from hddm.data.images import save_png, to_bytes
from hddm.experts.assembly import assemble
from hddm.experts.expert_folders import save_expert

PORT = 8461
PATIENCE = 600
EXPERTS = 2


@dataclass(frozen=True)
class Settings:
    """Of experts, and of what is asked of them."""

    name: str
    hidden_size: int
    depth: int
    side: int
    steps: int = 10
    batch: int = 16
    clients: int = 32
    images: int = 128
    requests: int = 6
    repeats: int = 3


LARGE = Settings("DiT-S width and depth, 64 tokens", 384, 12, 16)
TINY = Settings("the quickstart's size", 64, 4, 8)


def write_experts(folder: Path, settings: Settings) -> Path:
    """An ensemble of random weights under ``draw``."""
    folders, size = [], Size(settings.hidden_size, settings.depth, settings.hidden_size // 64)
    for k in range(EXPERTS):
        (one := folder / f"expert{k}").mkdir(parents=True)
        # Those of even numbers flow.
        save_expert(
            one, random_expert(size, (3, settings.side, settings.side), 2, 2 * k, 2 * EXPERTS)
        )
        folders.append(one)
    assemble(folders, folder / "ensemble")
    return folder / "ensemble"


@contextlib.contextmanager
def serving(folder: Path, batch: int) -> Iterator[httpx.Client]:
    """``hddm serve`` with a thread for each expert."""
    command = [sys.executable, "-m", "hddm_cli", "serve", str(folder), "--port", str(PORT)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, "--batch-size", str(batch)], stdout=log, stderr=log)
        try:
            text = ""
            while "answer; Ctrl-C" not in text:
                time.sleep(0.5)
                log.seek(0)
                text = log.read()
                if process.poll() is not None:
                    raise SystemExit(text)
            limits = httpx.Limits(max_connections=64)
            with httpx.Client(
                base_url=f"http://127.0.0.1:{PORT}", timeout=PATIENCE, limits=limits
            ) as client:
                yield client
        finally:
            process.terminate()
            process.wait()


def measure(settings: Settings) -> dict[str, Any]:
    """Seconds of a request for one batch, and images per second of a crowd, each beside the library's."""
    with tempfile.TemporaryDirectory() as root:
        folder = write_experts(Path(root), settings)
        model = hddm.load(folder)
        assert isinstance(model, hddm.Ensemble)

        def library(num: int, seed: int, threads: int, **options: Any) -> float:
            torch.set_num_threads(threads)
            began = time.perf_counter()
            samples = hddm.sample(
                model, num, seed, settings.steps, batch_size=settings.batch, **options
            )
            for image in to_bytes(samples):
                save_png(image, io.BytesIO())
            return time.perf_counter() - began

        with serving(folder, settings.batch) as client:

            def request(seed: int, **body: Any) -> float:
                began = time.perf_counter()
                body = {"prompt": "", "seed": seed, "steps": settings.steps, **body}
                client.post("/v1/images/generations", json=body).raise_for_status()
                return time.perf_counter() - began

            def crowd(seed: int) -> float:
                began = time.perf_counter()
                seeds = range(seed * settings.images, (seed + 1) * settings.images)
                with ThreadPoolExecutor(settings.clients) as pool:
                    list(pool.map(request, seeds))
                return time.perf_counter() - began

            whole = {"n": min(settings.batch, 10), "model": "ensemble/expert0"}
            alone = {"num": whole["n"], "threads": 1, "expert": 0}
            request(0, **whole)
            library(seed=0, **alone)
            pairs = [
                (request(seed, **whole), library(seed=seed, **alone))
                for _ in range(settings.repeats)
                for seed in range(1, settings.requests + 1)
            ]
            crowds = [
                (crowd(seed), library(settings.images, seed, EXPERTS))
                for seed in range(settings.repeats)
            ]
    return {
        "settings": asdict(settings),
        "request": pairs,
        "crowd": crowds,
        "batch_images": whole["n"],
    }


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """The report."""
    text = [
        "# A service beside the library",
        "",
        f"`hddm serve` of {EXPERTS} flow experts under `draw` on this machine, a thread each, beside "
        "`hddm.sample` in this process, in turn. Medians, least and greatest in brackets. A request: one "
        "expert, a thread, PNG files on both sides. A crowd: clients that each send one request after the "
        "other for one image of a seed of its own, beside one call of the library for all of them with "
        f"{EXPERTS} threads.",
        "",
        "| experts | a request, s | library, s | ratio | a crowd, images/s | library, images/s | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        settings, pairs, crowds = one["settings"], one["request"], one["crowd"]
        rates = [tuple(settings["images"] / seconds for seconds in pair) for pair in crowds]
        text.append(
            f"| {settings['name']}: {one['batch_images']} images of {settings['steps']} steps; "
            f"{settings['clients']} clients "
            f"| {_spread([a for a, _ in pairs], 3)} | {_spread([b for _, b in pairs], 3)} "
            f"| {_spread([a / b for a, b in pairs], 3)} "
            f"| {_spread([a for a, _ in rates], 1)} | {_spread([b for _, b in rates], 1)} "
            f"| {_spread([a / b for a, b in rates], 2)} |"
        )
    return text


def serving_benchmark(results: ResultsOption = RESULTS, quick: QuickOption = False) -> None:
    """Time requests to a service of random weights, and a crowd of clients, beside the library."""
    from dataclasses import replace

    start = Start(results)
    chosen = (
        [replace(one, images=64, requests=2, repeats=1) for one in (TINY,)]
        if quick
        else [LARGE, TINY]
    )
    found = [measure(one) for one in chosen]
    typer.echo(start.write("serving-cpu", lines(found), {"threads": 1, "rows": found}))


if __name__ == "__main__":
    main(lambda: typer.run(serving_benchmark))
