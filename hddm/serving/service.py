"""Service of an ensemble on a Ray cluster: a deployment for the front, and one per expert (`serve`).

Every machine needs this package, and the ensemble's folder under the same path. Ray Serve restarts a worker
that died, on another machine if necessary.
"""

import functools
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hddm.experts.components import how_to_add
from hddm.experts.ensemble_records import numbered
from hddm.experts.loading import open_ensemble
from hddm.experts.parts import numbers_of
from hddm.networks.families import family_of
from hddm.networks.programs.permission import programs_allowed
from hddm.networks.prompts import several_in, text_parts
from hddm.serving.placement import FRONT, GPUS, Placement, refuse_lack, settings_for
from hddm.serving.workers import Worker
from hddm.settings import Limits, ServeSettings
from hddm.utils.errors import (
    HddmError,
    UsageError,
    counted,
    in_words,
    one_line,
    optional,
    shown,
)
from hddm.utils.processes import StopRequest
from hddm.utils.progress import Progress
from hddm.utils.ray_workers import LOCAL, LOOPBACK, connected

APPLICATION = "hddm"
TOKEN = "HDDM_TOKEN"
"""Environment variable that holds the bearer token of a service."""
RAYS_OWN = ("num_cpus", "num_gpus", "memory")
"""Resources that Ray knows; all others are the user's own."""
QUIET = {"log_level": "ERROR", "enable_access_log": False}

log = logging.getLogger(__name__)


def serve(
    folder: Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: ServeSettings | None = None,
    placement: Placement | None = None,
    address: str = LOCAL,
    on_ready: Callable[[Sequence[str]], None] = lambda names: None,
) -> None:
    """Serve an ensemble until a signal comes.

    Args:
        folder: an ensemble, an expert, or the Paris release.
        host: address to listen on; one that other machines reach needs a token in `TOKEN`.
        port: port to listen on.
        settings: where networks run, and bounds of requests.
        placement: number and resources of the workers.
        address: address of a Ray cluster; ``local`` starts one on this machine.
        on_ready: gets the names of the experts once requests are answered.

    Raises:
        HddmError: without Ray, for an ensemble that cannot be opened, a cluster that does not answer or lacks
            resources, and a port that is taken.
    """
    ray = optional("ray", "hddm serve", "serve")
    optional("ray.serve", "hddm serve", "serve")
    optional("python_multipart", "hddm serve", "serve")
    # A token from a file may end in a line break.
    token = os.environ.get(TOKEN, "").strip() or None
    if token is None and host not in LOOPBACK:
        raise UsageError(
            f"`host` {host}: is open to other machines; set {TOKEN} to a token for clients"
        )
    settings, placement = settings or ServeSettings(), placement or Placement()
    with programs_allowed(settings.allow_program):
        names = names_of(folder)
    if settings.quantize:
        optional("torchao", "`quantize`", "quantize")
    placement.check(names)
    replicas = {name: placement.copies(name) for name in names}
    own: dict[str, Any] = {}
    if address == LOCAL:
        _refuse_taken(host, port)
        # On a busy machine Ray would restart its proxy, and warn of what `Progress` reports anyway.
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
        os.environ.setdefault("SERVE_SLOW_STARTUP_WARNING_S", "600")
        # Ray places workers by number of processors, and all of these must be on this machine.
        needed = placement.of_all(names, 0)
        cpus = needed[FRONT]["num_cpus"]
        for name, count in replicas.items():
            cpus += needed[name]["num_cpus"] * count
        own = {"num_cpus": int(cpus) + 1}
    with connected(ray, address, **own):
        from ray import serve as ray_serve

        gpus = ray.cluster_resources().get("GPU", 0.0) if settings.device in GPUS else 0.0
        if settings.device == "cuda" and not gpus:
            raise HddmError(
                "`device` cuda: the cluster has no GPU; use auto, or add a machine with one"
            )
        of = placement.of_all(names, gpus)
        refuse_lack(ray.cluster_resources(), [of[name] for name in placement.processes(names)])
        running = ray_serve.status().applications
        if running:
            raise HddmError(
                f"`ray` {address}: Ray Serve runs {', '.join(running)} there already; end it first (where it "
                "was started, or with serve shutdown), or use another cluster"
            )
        log.info("%s: starts %s; each reads its own weights", folder, counted(len(names), "expert"))
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        # The front checks a token by its hash, and does not know it.
        digest = token and hashlib.sha256(token.encode()).hexdigest()
        front = application(folder, settings, of, replicas, digest)

        def started() -> list[str]:
            found = ray_serve.status().applications.get(APPLICATION)
            if found is None:
                return ["Ray Serve itself"]
            ready = 0
            for name in names:
                one = found.deployments.get(name)
                ready += one is not None and one.status == "HEALTHY"
            return [f"{ready} of {counted(len(names), 'expert')} ready"]

        try:
            try:
                with Progress(None, "start the service", more=started, is_drawn=False):
                    # An idle Ray Serve would keep its own port.
                    ray_serve.shutdown()
                    listening = {"host": host, "port": port}
                    ray_serve.start("HeadOnly", http_options=listening, logging_config=QUIET)
                    ray_serve.run(front, name=APPLICATION, route_prefix="/")
                    for name in names:
                        worker = ray_serve.get_deployment_handle(name, APPLICATION)
                        if reason := worker.ready.remote().result():
                            raise ValueError(reason)
            except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise HddmError(
                    f"{folder}: the service did not start ({one_line(error, 400)})"
                ) from error
            with StopRequest() as stop:
                on_ready(names)
                stop.wait()
        finally:
            # A local cluster ends with the connection, and may have been stopped together with this process.
            if address != LOCAL:
                ray_serve.shutdown()


def names_of(folder: Path) -> list[str]:
    """Names of an ensemble's experts, all different, by which they are requested and placed.

    Raises `HddmError` as `hddm.load`, and for an expert without the VAE or text encoder that it needs.
    """
    opened = open_ensemble(folder, torch.float32)
    experts = opened.experts
    own = [one.member.name or str(k) for k, one in enumerate(experts)]
    names = []
    for k, name in enumerate(own):
        is_taken = own.count(name) > 1 or name == FRONT
        names.append(f"{name}-{k}" if is_taken else name)
    vaes, texts = numbers_of(experts, "vae").of, numbers_of(experts, "text_encoder").of
    has_classes = any(one.classes for one in experts)
    lacking, missing, trusts = list[str](), list[str](), False
    for name, one, vae, text in zip(names, experts, vaes, texts, strict=True):
        needed = {} if one.record.makes_pictures else {"vae": vae}
        if one.record.takes_text and not has_classes:
            place = folder / opened.components.get(numbered("text_encoder", text), "text_encoder")
            kinds = text_parts(family_of(one.network), one.record.conditions)
            if several_in(place):
                kinds = ("text_encoder",)
            needed |= dict.fromkeys(kinds, text)
        known = {"vae": one.record.latent_space, "text_encoder": one.record.text_encoder}
        for part, number in needed.items():
            if numbered(part, number) not in opened.components:
                lacking.append(name)
                missing.append(part)
                trusts |= part in known and known[part] is None
    if missing:
        parts = list(dict.fromkeys(missing))
        without = ", ".join(shown(list(dict.fromkeys(lacking)), 3))
        raise HddmError(
            f"{folder}: lacks {in_words(parts)} to make images of expert {without}; add what is missing "
            f"({how_to_add(folder, parts, trusts)})"
        )
    return names


def application(
    folder: Path,
    settings: ServeSettings,
    of: Mapping[str, Mapping[str, float]],
    replicas: Mapping[str, int],
    digest: str | None = None,
) -> Any:
    """What Ray Serve runs: the front, bound to the workers of each expert.

    Args:
        folder: the ensemble.
        settings: where networks run, and bounds of requests.
        of: resources of each worker and of the front, by name (`Placement.of_all`).
        replicas: number of workers by name, in the order of the experts.
        digest: SHA-256 of the token of clients.
    """
    from ray import serve as ray_serve

    from hddm.serving.front import Front

    path = str(folder.absolute())
    deploy = functools.partial(_deployment, ray_serve, settings)

    def own(name: str) -> tuple[ServeSettings, int]:
        """Settings and threads of a worker."""
        return settings_for(settings, of[name]), max(1, round(of[name]["num_cpus"]))

    workers = {}
    for k, (name, count) in enumerate(replicas.items()):
        deployed = deploy(Worker, name, of[name], num_replicas=count)
        workers[name] = deployed.bind(path, k, *own(name))
    return deploy(Front, FRONT, of[FRONT]).bind(path, *own(FRONT), digest, workers)


def _deployment(
    ray_serve: Any,
    limits: Limits,
    kind: type,
    name: str,
    resources: Mapping[str, float],
    **options: Any,
) -> Any:
    """A deployment with these resources, to be bound to its arguments."""
    actor: dict[str, Any] = {}
    of_users: dict[str, float] = {}
    for key, value in resources.items():
        if key in RAYS_OWN:
            actor[key] = value
        else:
            of_users[key] = value
    actor["resources"] = of_users
    return ray_serve.deployment(
        kind,
        name=name,
        ray_actor_options=actor,
        # More than the front admits, so that the front itself turns requests away.
        max_ongoing_requests=16 * limits.max_queue + 100,
        health_check_period_s=2,
        health_check_timeout_s=60,
        graceful_shutdown_timeout_s=5,
        logging_config=QUIET,
        **options,
    )


def _refuse_taken(host: str, port: int) -> None:
    """Raise an `HddmError` for an address that is not free; Ray would try it again and again."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, port))
    except OSError as error:
        raise HddmError(f"`port` {port}: cannot listen on {host} ({error.strerror})") from error
