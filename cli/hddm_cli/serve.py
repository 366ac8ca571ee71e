"""hddm serve."""

import os
from collections.abc import Sequence
from typing import Annotated

import typer

from hddm.utils.errors import UsageError
from hddm.utils.settings import ServeSettings
from hddm_cli.options import Model


def serve(
    ensemble: Model,
    settings: ServeSettings,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's need HDDM_TOKEN.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster, or local for this machine.")] = "local",
    num_replicas: Annotated[
        list[str] | None,
        typer.Option(metavar="N|EXPERT=N", help="Workers of every expert, or of one. Default: 1."),
    ] = None,
    resources: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER,…",
            help="Ray resources of each worker: num_cpus (also its threads), num_gpus or your own; EXPERT:… "
            "for one expert, front:… for the HTTP server. Default: num_cpus=1, and a GPU if there is one.",
        ),
    ] = None,
) -> None:
    """Serve an ensemble over HTTP.

    Each expert runs in its own process, on one machine or many. The server speaks OpenAI's images API (POST
    /v1/images/generations, GET /v1/models), and has /healthz and /metrics. Set HDDM_TOKEN to require that
    token from clients. With --no-batching, images are exactly those of hddm sample. Needs the
    extra serve (pip install '.[serve]' in a checkout).
    """
    from hddm.serving.service import Placement

    replicas = {}
    for text in num_replicas or ():
        name, _, count = text.rpartition("=")
        if not count.isdecimal() or int(count) < 1:
            raise UsageError(f"--num-replicas {text}: is N or EXPERT=N, with a whole number from 1")
        replicas[name] = int(count)
    placement = Placement(replicas, dict(map(_resources, resources or ())))

    import torch

    from hddm.serving.service import TOKEN
    from hddm.serving.service import serve as run

    def ready(names: Sequence[str]) -> None:
        shown = f"[{host}]" if ":" in host else host
        typer.echo(f"{ensemble}: {len(names)} experts ({', '.join(names)}) answer; Ctrl-C ends this")
        header = f' -H "Authorization: Bearer ${TOKEN}"' if os.environ.get(TOKEN) else ""
        typer.echo(f"  curl http://{shown}:{port}/v1/images/generations{header} -d '{{\"seed\": 7}}'")

    dtype = getattr(torch, settings.dtype)
    run(ensemble, host, port, settings, placement, dtype, settings.device, ray, ready)


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
                f"--resources {text}: write NAME=NUMBER, separated by commas, after EXPERT: for one "
                f"expert, such as num_gpus=1 or cats:num_cpus=4"
            )
    return name, found
