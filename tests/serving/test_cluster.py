"""A service on a Ray cluster of three nodes of this machine, or of one, as its users run it."""

import asyncio
import base64
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from hddm.experts.assembly import assemble
from tests.ensemble_files import flow_expert, saved, write_ensemble
from tests.serving.test_edits import erased, photo
from tests.serving.test_front import IMAGES

pytestmark = pytest.mark.slow
NODES = 3
MARK = "HDDM_TEST_CLUSTER"
GUIDE = Path(__file__).parents[2] / "docs/guides/serve.md"
PATIENCE = 240
REPLICA = "ray::ServeReplica:hddm:"
LOCAL = "local"
"""Mark of the processes of `local`."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of three nodes, of which each has a resource ``node0`` … ``node2``."""
    from ray.cluster_utils import Cluster

    # Processes of this cluster inherit it.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", MARK: str(os.getpid())}
    handler = signal.getsignal(signal.SIGTERM)
    cluster = Cluster()
    try:
        for k in range(NODES):
            options = {"include_dashboard": False} if k == 0 else {}
            cluster.add_node(num_cpus=2, resources={f"node{k}": 1}, **options)
        # Ray's own handler would end the tests that signal this process.
        signal.signal(signal.SIGTERM, handler)
        yield cluster.address
    finally:
        cluster.shutdown()


@dataclass(frozen=True)
class Service:
    """A service that runs."""

    folder: Path
    url: str
    log: Path

    def ask(self, **body: Any) -> list[bytes]:
        """Images of one request."""
        answer = httpx.post(self.url + IMAGES, json=body, timeout=PATIENCE)
        assert answer.status_code == 200, answer.text
        return [base64.b64decode(one["b64_json"]) for one in answer.json()["data"]]


@contextlib.contextmanager
def serving(
    folder: Path, log: Path, address: str, port: int, *options: str, mark: str = str(os.getpid())
) -> Iterator[Service]:
    """``hddm serve`` until the block ends; `workers` finds its processes by their mark."""
    command = [
        sys.executable,
        "-m",
        "hddm_cli",
        "serve",
        str(folder),
        "--ray",
        address,
        "--port",
        str(port),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *options], stdout=out, stderr=out, env=os.environ | {MARK: mark}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + PATIENCE
        while "answer; Ctrl-C" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        # Nothing of Ray's own.
        assert not re.search(r"\x1b|WARNING", log.read_text())
        assert httpx.get(f"{url}/healthz", timeout=PATIENCE).json() == {
            "status": "ok",
            "missing": [],
        }
        yield Service(folder, url, log)
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(PATIENCE)
    assert code == 0, log.read_text()


def processes(mark: str) -> dict[int, str]:
    """Names of the processes that inherited a mark, by number."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (path.parent / "environ").read_bytes().split(b"\0"):
                found[int(path.parent.name)] = (
                    path.read_bytes().split(b"\0")[0].decode(errors="replace").strip()
                )
    return found


def workers(mark: str = str(os.getpid())) -> dict[str, int]:
    """Process numbers of a service's workers and front by name."""
    replicas = {name: pid for pid, name in processes(mark).items() if name.startswith(REPLICA)}
    return {name.rpartition(":")[2].split(".")[0]: pid for name, pid in replicas.items()}


def resident(pid: int) -> int:
    """Bytes that a process has in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_worker_holds_the_weights_of_its_expert_alone(address: str, tmp_path: Path) -> None:
    """Two experts of 240 MB, against workers of tiny ones; before `service`, since a cluster has one."""
    held = {}
    for name, sizes in (("tiny", {}), ("large", {"hidden_size": 1024, "depth": 4, "num_heads": 8})):
        root = tmp_path / name
        root.mkdir()
        experts = [flow_expert(seed, num_classes=3, **sizes) for seed in range(2)]
        bytes_of = sum(p.numel() * p.element_size() for p in experts[0].network.parameters())
        folder = write_ensemble(root, experts)
        with serving(folder, root / "log", address, 8432):
            held[name] = {one: resident(pid) for one, pid in workers().items()}
    assert bytes_of > 200e6
    for one in ("0", "1"):
        above = held["large"][one] - held["tiny"][one]
        print(f"expert {one}: {above / bytes_of:.3f} of {bytes_of / 1e6:.0f} MB")
        assert 0.9 * bytes_of < above < 1.1 * bytes_of
    # The front reads none.
    assert held["large"]["front"] - held["tiny"]["front"] < 0.1 * bytes_of


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("service")
    folder = write_ensemble(root, [flow_expert(seed, num_classes=3) for seed in range(2)])
    places = [option for k in range(2) for option in ("--resources", f"{k}:node{k + 1}=0.5")]
    options = ("--no-batching", "--max-queue", "100", *places)
    with serving(folder, root / "log", address, 8431, *options) as one:
        yield one


def test_a_worker_that_is_killed_loses_no_request_and_changes_no_image(service: Service) -> None:
    bodies = [
        {"prompt": "cat", "seed": seed, "steps": 40, "strategy": "draw" if seed % 2 else "full"}
        for seed in range(50)
    ]
    expected = [service.ask(**body) for body in bodies[:8]]
    before = workers()

    async def crowd() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            tasks = [
                asyncio.ensure_future(client.post(service.url + IMAGES, json=body))
                for body in bodies
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            os.kill(before["1"], signal.SIGKILL)
            assert sum(not task.done() for task in tasks) > 20
            return await asyncio.gather(*tasks)

    answers = asyncio.run(crowd())
    assert [answer.status_code for answer in answers] == [200] * 50
    found = [
        [base64.b64decode(one["b64_json"]) for one in answer.json()["data"]] for answer in answers
    ]
    assert found[:8] == expected
    assert found == [service.ask(**body) for body in bodies]
    after = workers()
    assert after["1"] != before["1"]
    assert after["0"] == before["0"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of this machine alone, of an ensemble as the quickstart's: neither text nor class."""
    root = tmp_path_factory.mktemp("local")
    parts = [saved(root / name, flow_expert(k)) for k, name in enumerate(("old", "flow", "ddpm"))]
    assemble(parts, root / "grown", strategy="draw", share={str(root / "old"): 0.5})
    with serving(root / "grown", root / "log", "local", 8435, mark=LOCAL) as one:
        yield one


def test_it_listens_at_this_machine_alone_but_for_ports_that_ask_for_a_token(
    local: Service,
) -> None:
    """Exceptions: the gRPC ports of the front and of each worker, since Ray Serve fixes their address."""

    from ray.serve.generated.serve_pb2 import ASGIRequest

    names = processes(LOCAL)
    sockets = [
        (names[pid], one.laddr.ip.removeprefix("::ffff:"), one.laddr.port)
        for pid in names
        for one in psutil.Process(pid).net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    for name, ip, port in sorted(sockets):
        print(f"{ip:10} {port:5} {name}")
    assert (8435, "127.0.0.1") in [(port, ip) for _, ip, port in sockets]
    # Ray adds what a replica is at.
    outside = {name.split(".")[0]: port for name, ip, port in sockets if ip != "127.0.0.1"}
    assert sorted(outside) == [f"{REPLICA}{name}" for name in ("ddpm", "flow", "front", "old")]
    for port in outside.values():
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            # Ray would unpickle it.
            sent = ASGIRequest(pickled_request_metadata=b"code of a stranger")
            with pytest.raises(grpc.RpcError) as refused:
                call(sent.SerializeToString(), timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_the_lines_of_the_guide_work(
    local: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sketch.png", "photo.png"):
        photo().save(name)
    erased(photo()).save("erased.png")
    first, second = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(first.replace("http://127.0.0.1:8000", local.url), found)
    assert base64.b64decode(found["image"].data[0].b64_json) == local.ask(seed=7, steps=30)[0]
    exec(second.replace("http://127.0.0.1:8000", local.url), found)
    assert len(found["image"].data) == 1
    lines = re.findall(r"^ *curl .*$", GUIDE.read_text() + local.log.read_text(), re.MULTILINE)
    numbers = []
    for line in lines:
        words = shlex.split(line.replace("http://127.0.0.1:8000", local.url))
        answer = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
        numbers.append(len(answer["data"]))
    assert numbers == [2, 4, 1, 1, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_experts_start_ends_them(tmp_path: Path, number: signal.Signals) -> None:
    """To all processes, as a terminal and a system's manager send it; with a cluster of its own."""
    folder = write_ensemble(tmp_path, [flow_expert(seed) for seed in range(2)])
    command = [sys.executable, "-m", "hddm_cli", "serve", str(folder), "--port", "8434"]
    log = tmp_path / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    end = time.monotonic() + PATIENCE
    while "starts 2 experts" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    os.killpg(process.pid, number)
    assert process.wait(PATIENCE) == 128 + number
    assert f"stopped by {number.name}" in log.read_text()
    # None of Ray's processes of this session is left.
    while left := subprocess.run(
        ["pgrep", "-s", str(process.pid)], capture_output=True, text=True
    ).stdout:
        assert time.monotonic() < end, left
        time.sleep(0.5)
