"""hddm serve."""

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BeforeValidator, Field

from hddm.settings import Described, Positive, ServeSettings, Shown
from hddm.utils.errors import counted
from hddm_cli.options import DryRun, Model
from hddm_cli.usage import show

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Resource = Annotated[str, Field(min_length=1)]


def _replicas(texts: Any) -> Any:
    """Read texts ``N`` or ``EXPERT=N`` as numbers by expert; "" stands for all experts."""
    found = {}
    for one in texts:
        name, _, number = one.rpartition("=")
        found[name] = number
    return found


def _resources(texts: Any) -> Any:
    """Read texts ``NAME=NUMBER,…`` or ``EXPERT:NAME=NUMBER,…`` as amounts by expert and resource.

    The name "" stands for all experts.
    """
    found = {}
    for one in texts:
        name, _, listed = one.rpartition(":")
        amounts = {}
        for pair in listed.split(","):
            resource, _, number = pair.partition("=")
            amounts[resource.strip()] = number or resource
        found[name] = amounts
    return found


class Cluster(Described):
    """Where a service listens, and where its workers run."""

    host: str = "127.0.0.1"
    """Address to listen on; others than this machine's need HDDM_TOKEN."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port to listen on."""
    ray: str = "local"
    """Address of a Ray cluster, or local for this machine."""
    num_replicas: Annotated[
        dict[str, Positive], BeforeValidator(_replicas), Shown("N|EXPERT=N")
    ] = Field({})
    """Workers of every expert, or of one. Default: 1."""
    resources: Annotated[
        dict[str, dict[Resource, Amount]], BeforeValidator(_resources), Shown("NAME=NUMBER,…")
    ] = Field({})
    """Ray resources of each worker: num_cpus (also its threads), num_gpus or your own; EXPERT:… for one
    expert, front:… for the HTTP server. Default: num_cpus=1, and the cluster's GPUs shared out evenly."""


def lines_of_ready(
    ensemble: Path, cluster: Cluster, experts: Sequence[str], header: str = ""
) -> list[str]:
    """What is served, under which names it is requested, and an example with this option of curl."""
    name = ensemble.absolute().name
    lines = [f"{ensemble}: {counted(len(experts), 'expert')} ready; Ctrl-C ends this"]
    if len(experts) > 1:
        own = ", ".join(f"{name}/{one}" for one in experts)
        lines.append(f"  model {name}, the default, is all experts together; each alone: {own}")
    host = f"[{cluster.host}]" if ":" in cluster.host else cluster.host
    body = shlex.quote(json.dumps({"model": name, "seed": 7}, ensure_ascii=False))
    address = f"http://{host}:{cluster.port}/v1/images/generations"
    lines.append(f"  curl {address}{header} -d {body}")
    return lines


def serve(
    ensemble: Model, settings: ServeSettings, cluster: Cluster, dry_run: DryRun = False
) -> None:
    """Serve an ensemble over HTTP.

    Each expert runs in its own process, on one machine or many. The server speaks OpenAI's images API (POST
    /v1/images/generations and /v1/images/edits, GET /v1/models), and has /healthz and /metrics. Set
    HDDM_TOKEN to require that token from clients. With --no-batching, images are exactly those of hddm
    sample. Needs the extra serve (pip install '.[serve]' in a checkout).
    """
    from hddm.experts.records import refuse_no_model

    refuse_no_model(ensemble)
    from hddm.serving.placement import Placement
    from hddm.serving.service import TOKEN
    from hddm.serving.service import serve as run

    def ready(names: Sequence[str]) -> None:
        header = f' -H "Authorization: Bearer ${TOKEN}"' if os.environ.get(TOKEN) else ""
        for line in lines_of_ready(ensemble, cluster, names, header):
            typer.echo(line)

    placement = Placement(cluster.num_replicas, cluster.resources)
    if dry_run:
        from hddm.serving.needs import needs_of_service

        needs, lines = needs_of_service(ensemble, settings, placement, cluster.ray)
        show(*needs, more=lines)
        return
    run(ensemble, cluster.host, cluster.port, settings, placement, cluster.ray, ready)
