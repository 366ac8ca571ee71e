"""An S3 server on this machine, by moto, and hddm's commands in processes of their own that use it."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BUCKET = "bucket"
KEY, SECRET = "AKIATESTKEYOFNOBODY", "TheSecretThatNobodyMayRead"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class S3:
    """A server with one empty bucket: its port, and fsspec's file system of it."""

    port: int
    files: Any

    def names(self, folder: str = "") -> set[str]:
        """Names of all files below a folder of the bucket."""
        self.files.invalidate_cache()
        root = f"{BUCKET}/{folder}".rstrip("/")
        return {name.removeprefix(f"{root}/") for name in self.files.find(root)}

    def contents(self, folder: str = "") -> dict[str, bytes]:
        """The same, with their bytes."""
        root = f"{BUCKET}/{folder}".rstrip("/")
        return {name: self.files.cat_file(f"{root}/{name}") for name in self.names(folder)}


def free_port() -> int:
    """A port that nothing listens to."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of a server."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    pytest.importorskip("flask_cors")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield port
        server.kill()


@pytest.fixture
def s3(s3_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, emptied; addresses lead there, and the cache is the test's own."""
    import fsspec

    request = urllib.request.Request(f"http://127.0.0.1:{s3_port}/moto-api/reset", method="POST")
    urllib.request.urlopen(request).close()
    for name, value in environment(s3_port, tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    type(files).clear_instance_cache()
    files.mkdir(BUCKET)
    return S3(s3_port, files)


def environment(port: int, cache: Path) -> dict[str, str]:
    """Variables by which a process finds the server on this port."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_MAX_ATTEMPTS": "1",
        "HDDM_CACHE": str(cache),
    }


def command_of(*words: object) -> list[str]:
    """``hddm`` with these words, in a process of its own."""
    return [sys.executable, "-m", "hddm_cli", *map(str, words)]


def in_its_own(**changes: str) -> dict[str, Any]:
    """Arguments of `subprocess.run` for `command_of`; a variable that becomes empty is left out."""
    paths = f"{ROOT}{os.pathsep}{ROOT / 'cli'}"
    own = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **changes}
    own = {name: value for name, value in own.items() if value}
    return {"env": own, "text": True, "capture_output": True}
