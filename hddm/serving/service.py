"""Service of an ensemble on a Ray cluster: a deployment for the front, and one for each expert (`serve`).

Every machine needs this package, and sees the ensemble's folder under the same path. Ray Serve starts a
worker that died again, elsewhere if need be.
"""

import hashlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hddm.experts.loading import open_ensemble
from hddm.experts.model_index import numbered
from hddm.experts.parts import class_lists, encoders_of
from hddm.networks.wrappers import TEXT_CONDITIONS
from hddm.serving.requests import Limits
from hddm.serving.workers import Worker
from hddm.training.ray_islands import LOCAL, LOOPBACK, connected
from hddm.utils.errors import HddmError, UsageError, choose, counted, did_you_mean, one_line, optional
from hddm.utils.processes import StopRequest
from hddm.utils.progress import Progress

FRONT = "front"
APPLICATION = "hddm"
TOKEN = "HDDM_TOKEN"
"""Environment variable that holds the bearer token of a service."""
RAYS_OWN = ("num_cpus", "num_gpus", "memory")
"""Resources that Ray has options for; others are of one's own."""
QUIET = {"log_level": "ERROR", "enable_access_log": False}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """How often each expert runs and what each of its workers takes; keys are names, "" stands for all."""

    replicas: Mapping[str, int] = field(default_factory=dict)
    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """As Ray names them: ``num_cpus``, ``num_gpus``, ``memory``, or resources of one's own."""

    def refuse_unknown(self, names: Sequence[str]) -> None:
        """Raise a `UsageError` for an expert that is not there."""
        for option, given in (("--num-replicas", self.replicas), ("--resources", self.resources)):
            known = [*names, *([FRONT] if option == "--resources" else [])]
            for name in given:
                if name and name not in known:
                    raise UsageError(f"{option} {name}: {choose(name, known)}")

    def of(self, name: str, has_gpus: bool) -> dict[str, float]:
        """Resources of a worker of this name."""
        asked = {"num_cpus": 1.0, "num_gpus": float(has_gpus and name != FRONT)}
        # The front is not an expert.
        asked |= self.resources.get("", {}) if name != FRONT else {}
        return asked | dict(self.resources.get(name, {}))


def serve(
    folder: Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    placement: Placement | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "auto",
    address: str = LOCAL,
    on_ready: Callable[[Sequence[str]], None] = lambda names: None,
) -> None:
    """Serve an ensemble until a signal comes.

    Args:
        folder: an ensemble, an expert, or the Paris release.
        host: address to listen at; another than this machine alone needs a token in `TOKEN`.
        port: to listen at.
        limits: of requests.
        placement: of the experts.
        dtype: that networks run in.
        device: of the workers; see `hddm.utils.tensors.available_device`.
        address: of a Ray cluster; ``local`` starts one on this machine.
        on_ready: told the names of the experts, once requests are answered.

    Raises:
        HddmError: without Ray, for an ensemble that cannot be opened, a cluster that does not answer or has
            too little, and a port that is taken.
    """
    ray = optional("ray", "hddm serve", "serve")
    optional("ray.serve", "hddm serve", "serve")
    # Files that hold one end in a line break.
    token = os.environ.get(TOKEN, "").strip() or None
    if token is None and host not in LOOPBACK:
        raise UsageError(
            f"--host {host}: is open to other machines; set {TOKEN} to a token that clients send"
        )
    names, limits, placement = names_of(folder), limits or Limits(), placement or Placement()
    placement.refuse_unknown(names)
    replicas = {name: placement.replicas.get(name, placement.replicas.get("", 1)) for name in names}
    own: dict[str, Any] = {}
    if address == LOCAL:
        _refuse_taken(host, port)
        # On a busy machine Ray would give its proxy up and begin anew, and warn of what `Progress` tells.
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
        os.environ.setdefault("SERVE_SLOW_STARTUP_WARNING_S", "600")
        # Ray counts processors to place workers, and all of these are to be on this machine.
        needed = [placement.of(name, False)["num_cpus"] * count for name, count in replicas.items()]
        own = {"num_cpus": int(sum(needed) + placement.of(FRONT, False)["num_cpus"]) + 1}
    around = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "hddm.serving.answers:middlewares"}
    with connected(ray, address, around, **own):
        from ray import serve as ray_serve

        has_gpus = device in ("auto", "cuda") and ray.cluster_resources().get("GPU", 0) > 0
        of = {name: placement.of(name, has_gpus) for name in (*names, FRONT)}
        _refuse_lack(
            ray.cluster_resources(), [of[FRONT], *(of[name] for name in names for _ in range(replicas[name]))]
        )
        if running := ray_serve.status().applications:
            raise HddmError(
                f"--ray {address}: Ray Serve runs {', '.join(running)} there already, on one port; end it "
                "first (where it was started, or by: serve shutdown), or take another cluster"
            )
        log.info("%s: starts %d experts; each reads its own weights", folder, len(names))
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        application = _application(
            ray_serve, folder.absolute(), names, replicas, of, limits, token, dtype, device
        )

        def started() -> list[str]:
            found = ray_serve.status().applications.get(APPLICATION)
            of_each = [] if found is None else [found.deployments.get(name) for name in names]
            ready = sum(one is not None and one.status == "HEALTHY" for one in of_each)
            return [f"{ready} of {counted(len(names), 'expert')} ready" if of_each else "Ray Serve itself"]

        try:
            try:
                with Progress(None, "start the service", more=started, is_drawn=False):
                    # One that has nothing to run would keep its own port.
                    ray_serve.shutdown()
                    ray_serve.start(
                        proxy_location="HeadOnly",
                        http_options={"host": host, "port": port},
                        logging_config=QUIET,
                    )
                    ray_serve.run(application, name=APPLICATION, route_prefix="/")
                    for name in names:
                        worker = ray_serve.get_deployment_handle(name, APPLICATION)
                        if reason := worker.ready.remote().result():
                            raise ValueError(reason)
            except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise HddmError(f"{folder}: the service did not start ({one_line(error, 400)})") from error
            with StopRequest() as stop:
                on_ready(names)
                stop.wait()
        finally:
            # A cluster of this machine alone ends with the connection, and may have been stopped with us.
            if address != LOCAL:
                ray_serve.shutdown()


def names_of(folder: Path) -> list[str]:
    """Names of an ensemble's experts, by which they are asked for and placed.

    Raises `HddmError` as `hddm.load`, and where an expert lacks the VAE or the text encoder that every image
    of it needs.
    """
    opened = open_ensemble(folder, torch.float32)
    members, named = opened.facts.experts, [(one.name, one.facts) for one in opened.experts]
    names = [member.name or str(k) for k, member in enumerate(members)]
    encoders, has_classes = encoders_of(members, named), any(class_lists(members, named))
    for k, (_, facts) in enumerate(named):
        vae, text = encoders.vaes[k], encoders.texts[k]
        needed = [] if facts.makes_pictures else ["vae"]
        if TEXT_CONDITIONS[0] in facts.conditions and not has_classes:
            needed += ["text_encoder", "tokenizer"]
        for part in needed:
            if numbered(part, vae if part == "vae" else text) not in opened.components:
                raise HddmError(
                    f"{folder}: expert {names[k]} needs a {part} to make images; add one by hddm assemble "
                    f"--{part.replace('_', '-')} FOLDER, or to Paris as its folder {part}"
                )
    return names


def _application(
    ray_serve: Any,
    folder: Path,
    names: Sequence[str],
    replicas: Mapping[str, int],
    of: Mapping[str, Mapping[str, float]],
    limits: Limits,
    token: str | None,
    dtype: torch.dtype,
    device: str,
) -> Any:
    """The deployments, bound to each other."""
    from hddm.serving.front import Front

    quick = {"health_check_period_s": 2, "health_check_timeout_s": 60, "graceful_shutdown_timeout_s": 5}

    def deployed(kind: type, name: str, **options: Any) -> Any:
        asked: dict[str, Any] = {key: value for key, value in of[name].items() if key in RAYS_OWN}
        asked["resources"] = {key: value for key, value in of[name].items() if key not in RAYS_OWN}
        # More than it admits, so that the service itself turns requests away.
        most = 16 * limits.queue + 100
        made = ray_serve.deployment(kind, name=name, logging_config=QUIET, **quick)
        return made.options(ray_actor_options=asked, max_ongoing_requests=most, **options)

    workers = {
        name: deployed(Worker, name, num_replicas=replicas[name]).bind(
            str(folder), k, dtype, device, _threads(of[name]), limits.batch_size, limits.is_batched
        )
        for k, name in enumerate(names)
    }
    # The front needs no more to know the token by.
    digest = None if token is None else hashlib.sha256(token.encode()).hexdigest()
    return deployed(Front, FRONT).bind(str(folder), dtype, _threads(of[FRONT]), limits, digest, workers)


def _refuse_taken(host: str, port: int) -> None:
    """Raise an `HddmError` where one cannot listen, which Ray would try again and again."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, port))
    except OSError as error:
        raise HddmError(
            f"--port {port}: cannot listen at {host} ({error.strerror}); choose another"
        ) from error


def _threads(resources: Mapping[str, float]) -> int:
    return max(1, round(resources["num_cpus"]))


def _refuse_lack(there: Mapping[str, float], asked: Sequence[Mapping[str, float]]) -> None:
    """Raise an `HddmError` where a cluster has less of a resource than the workers ask for together."""
    total = Counter[str]()
    for resources in asked:
        total.update(resources)
    for key, value in total.items():
        name = {"num_cpus": "CPU", "num_gpus": "GPU"}.get(key, key)
        if value > there.get(name, 0):
            raise HddmError(
                f"--resources: the workers ask for {value:g} of {name}, and the cluster has "
                f"{there.get(name, 0):g}; ask for less, or add machines"
                f"{did_you_mean(name, ['num_cpus', 'num_gpus', *there])}"
            )
