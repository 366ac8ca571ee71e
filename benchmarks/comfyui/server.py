"""ComfyUI as a process of its own, in a folder of its own, asked over its API."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from integrations.build_pack import build

PACK = "hddm-nodes"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_LIMIT = 600.0
"""Seconds that a workflow may take."""
_HIDING = """
import sys
from pathlib import Path
sys.path[:] = [p for p in sys.path if not (Path(p) / "hddm" / "velocity.py").is_file()]
"""
"""Run as Python starts: hides an hddm that a developer has installed, so that the pack uses its own."""


class QueueError(Exception):
    """A workflow that ComfyUI refused or could not finish; the message is what its user sees."""


class Comfy:
    """A running ComfyUI.

    Args:
        port: where it listens.
        base: its folder of models, nodes and pictures.
    """

    def __init__(self, port: int, base: Path) -> None:
        self._address, self.base = f"http://127.0.0.1:{port}", base

    def get(self, path: str) -> Any:
        """The answer to a GET request."""
        with urllib.request.urlopen(f"{self._address}{path}", timeout=30) as answer:
            return json.loads(answer.read())

    def run(self, workflow: Mapping[str, Any]) -> dict[str, Any]:
        """Queue a workflow in API form, wait for it, and give the outputs of its nodes.

        Raises:
            QueueError: for one that is refused or fails.
        """
        return _outputs(self._finished(self._queue(workflow)))

    def cancel(self, workflow: Mapping[str, Any], started: Path) -> str:
        """Queue a workflow, cancel it once the file ``started`` is there, and name the node that ran then.

        An empty name is that of a workflow which ended by itself.
        """
        number, end = self._queue(workflow), time.monotonic() + _LIMIT
        while not started.exists() and time.monotonic() < end:
            time.sleep(0.05)
        self._post("/interrupt", {})
        for kind, facts in self._finished(number)["status"]["messages"]:
            if kind == "execution_interrupted":
                return str(facts["node_type"])
        return ""

    def _post(self, path: str, content: Mapping[str, Any]) -> bytes:
        request = urllib.request.Request(f"{self._address}{path}", json.dumps(content).encode())
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                found: bytes = answer.read()
        except urllib.error.HTTPError as error:
            raise QueueError(error.read().decode()) from error
        return found

    def _queue(self, workflow: Mapping[str, Any]) -> str:
        return str(json.loads(self._post("/prompt", {"prompt": workflow}))["prompt_id"])

    def _finished(self, number: str) -> dict[str, Any]:
        """What ComfyUI's history says of a workflow, once it has ended."""
        end = time.monotonic() + _LIMIT
        while time.monotonic() < end:
            history = self.get(f"/history/{number}")
            if number in history:
                return dict(history[number])
            time.sleep(0.05)
        raise QueueError(f"not finished within {_LIMIT:g} s")

    def images_of(self, output: Mapping[str, Any]) -> list[NDArray[np.int64]]:
        """Pictures (H, W, 3) that a node saved."""
        found = []
        for one in output["images"]:
            with Image.open(self.base / "output" / one["subfolder"] / one["filename"]) as picture:
                found.append(np.asarray(picture.convert("RGB"), dtype=np.int64))
        return found


@contextmanager
def serving(model: Path, port: int = 8196) -> Iterator[str]:
    """The address of an ``hddm serve`` of ``model``, in a process of its own."""
    command = [sys.executable, "-c", "from hddm_cli.app import app; app()", "serve", str(model)]
    process = subprocess.Popen([*command, "--port", str(port)], cwd=ROOT)
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + 600
    try:
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{address}/healthz") as there,
            ):
                if there.status == 200:
                    break
            if process.poll() is not None or time.monotonic() > end:
                raise QueueError(f"{' '.join(command)}: did not start")
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=120)


def _outputs(entry: Mapping[str, Any]) -> dict[str, Any]:
    for kind, facts in entry["status"]["messages"]:
        if kind == "execution_error":
            raise QueueError(facts["exception_message"].strip())
    return dict(entry["outputs"])


@contextmanager
def running(
    comfyui: Path, python: str = sys.executable, port: int = 8197, threads: str = "1"
) -> Iterator[Comfy]:
    """ComfyUI of the folder ``comfyui``, with a copy of the pack and the nodes for tests."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for name in ("custom_nodes", "models/diffusion_models", "input", "output", "user", "temp"):
            (base / name).mkdir(parents=True)
        build(base / "custom_nodes" / PACK)
        shutil.copytree(HERE / "test_nodes", base / "custom_nodes" / "hddm-test-nodes")
        (base / "start").mkdir()
        (base / "start" / "sitecustomize.py").write_text(_HIDING)
        log = base / "log.txt"
        command = [python, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port)]
        command += ["--disable-api-nodes", "--base-directory", str(base)]
        command += ["--database-url", "sqlite:///:memory:"]
        environment = {**os.environ, "PYTHONPATH": str(base / "start"), "OMP_NUM_THREADS": threads}
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, cwd=comfyui, env=environment, stdout=stream, stderr=subprocess.STDOUT
            )
        try:
            yield _waited_for(Comfy(port, base), process, log)
        finally:
            process.terminate()
            process.wait(timeout=60)


def _waited_for(comfy: Comfy, process: "subprocess.Popen[bytes]", log: Path) -> Comfy:
    end = time.monotonic() + 900
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            nodes = comfy.get("/object_info")
        except OSError:
            time.sleep(0.5)
            continue
        if "HDDMMixModels" in nodes and "HDDMTestModel" in nodes:
            return comfy
        break
    raise QueueError(f"ComfyUI did not start with the nodes:\n{log.read_text()[-3000:]}")
