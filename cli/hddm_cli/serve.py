"""hddm serve."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from hddm.utils.errors import UsageError
from hddm_cli.options import AnyDevice, InputArgument


def serve(
    ensemble: Annotated[Path, InputArgument(help="Ensemble or expert folder, or the Paris release.")],
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; others than this machine's need HDDM_TOKEN.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen at.")] = 8000,
    ray: Annotated[
        str, typer.Option("--ray", help="Ray cluster: its address, or local for one of this machine.")
    ] = "local",
    num_replicas: Annotated[
        list[str] | None,
        typer.Option("--num-replicas", metavar="[EXPERT=]N", help="Workers of each expert; default: 1."),
    ] = None,
    resources: Annotated[
        list[str] | None,
        typer.Option(
            "--resources",
            metavar="[EXPERT:]NAME=NUMBER,…",
            help="What a worker takes of the cluster: num_cpus (also its threads), num_gpus, or names of "
            "one's own; EXPERT may be front. Default: num_cpus=1, and a GPU where there are some.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Images that an expert makes together, at most.")
    ] = 16,
    batching: Annotated[
        bool,
        typer.Option(
            "--batching/--no-batching",
            help="Make images of several requests together; without, they are hddm sample's, bit for bit.",
        ),
    ] = True,
    max_images: Annotated[
        int, typer.Option("--max-images", min=1, help="Images of a request, at most.")
    ] = 10,
    max_steps: Annotated[int, typer.Option("--max-steps", min=1, help="Steps of a request, at most.")] = 250,
    max_queue: Annotated[
        int, typer.Option("--max-queue", min=1, help="Requests that wait or run; one more gets a 429.")
    ] = 64,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds for a request, waiting included.")
    ] = 600.0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--dtype", help="Dtype that networks run in.")
    ] = "float32",
    device: AnyDevice = "auto",
) -> None:
    """Serve an ensemble over HTTP: each expert in a process of its own, on one machine or many.

    Speaks the images API of OpenAI's clients: POST /v1/images/generations, GET /v1/models; and /healthz and
    /metrics. Set HDDM_TOKEN to ask clients for it. Needs the extra serve.
    """
    from hddm.serving.front import Limits
    from hddm.serving.service import Placement

    replicas = {}
    for text in num_replicas or ():
        name, _, count = text.rpartition("=")
        if not count.isdecimal() or int(count) < 1:
            raise UsageError(f"--num-replicas {text}: is N or EXPERT=N, with a whole number from 1")
        replicas[name] = int(count)
    placement = Placement(replicas, dict(map(_resources, resources or ())))
    limits = Limits(max_images, max_steps, max_queue, timeout, batch_size, batching)

    import torch

    from hddm.serving.service import TOKEN
    from hddm.serving.service import serve as run

    def ready(names: Sequence[str]) -> None:
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"{ensemble}: {len(names)} experts ({', '.join(names)}) answer; Ctrl-C ends this")
        header = f' -H "Authorization: Bearer ${TOKEN}"' if os.environ.get(TOKEN) else ""
        typer.echo(f"  curl http://{shown}:{port}/v1/images/generations{header} -d '{{\"seed\": 7}}'")

    run(ensemble, host, port, limits, placement, getattr(torch, dtype), device, ray, ready)


def _resources(text: str) -> tuple[str, dict[str, float]]:
    name, _, listed = text.rpartition(":")
    found = {}
    for part in listed.split(","):
        key, _, number = part.partition("=")
        try:
            found[key.strip()] = float(number)
        except ValueError:
            found = {}
        if not key.strip() or not 0 <= found.get(key.strip(), -1) < float("inf"):
            raise UsageError(
                f"--resources {text}: is NAME=NUMBER, several by commas, after EXPERT: for one alone; as "
                "num_gpus=1 or cats:num_cpus=4"
            )
    return name, found
