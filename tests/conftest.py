"""Artefacts that many tests read, made once a session. A test that spoils one copies it first.

This file imports torch and hddm where it uses them: the process that hands tests out to others needs neither,
and these wait for it.
"""

import gc
import math
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.s3 import s3, s3_port  # noqa: F401

if TYPE_CHECKING:
    from tests.artefacts import Command
    from tests.benchmark_files import Finished


def _forked_problem(path: Path) -> str:
    """As `hddm.utils.pickles._problem`, by a fork of this process, which need not import torch again."""
    from hddm.utils import pickles

    end, start = os.pipe()
    if (child := os.fork()) == 0:
        code = 1
        try:
            with os.fdopen(start, "w") as sys.stdout:
                code = int(pickles.try_to_load(str(path)))
        finally:
            os._exit(code)
    os.close(start)
    with os.fdopen(end) as said:
        text = said.read()
    _, status = os.waitpid(child, 0)
    return (text or f"ends a process that loads it (status {status})") if status else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, also if it is asked for by its mark."""
    import torch

    if torch.cuda.is_available():
        return
    skips = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skips)


def pytest_collection() -> None:
    """Wait with collecting garbage until `pytest_collection_finish`: of imports, there is little."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what is imported, which it would go through again and again.

    Other tests run beside this process's own.
    """
    import torch

    torch.set_num_threads(1)
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def quick_pickles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles are checked by forks, except where fresh processes are what is tested."""
    from hddm.utils import pickles

    if "pickle" not in request.path.name:
        monkeypatch.setattr(pickles, "_problem", _forked_problem)


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_disks() -> Iterator[None]:
    """What is written reaches the disk later, as no power is lost here; test_syncing.py does wait."""
    from hddm.utils import syncing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(syncing, "_sync_file_system", lambda folder: True)
        yield


@pytest.fixture
def nothing_compiled_before() -> Iterator[None]:
    import torch

    torch.compiler.reset()
    # It keeps its counts.
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test fails where a socket is opened, or an address looked up."""

    def refuse(*args: object, **named: object) -> None:
        raise AssertionError("opens a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artefacts")


@pytest.fixture(scope="session")
def images(root: Path) -> Path:
    """48 images in two class folders."""
    from tests.artefacts import write_images

    return write_images(root / "images")


@pytest.fixture(scope="session")
def shards(root: Path, images: Path) -> Path:
    """A partition into two shards."""
    from hddm.data.partition import partition

    partition(images, root / "shards", 2)
    return root / "shards"


@pytest.fixture(scope="session")
def whole(root: Path, images: Path) -> Path:
    """One shard of all images: what it holds depends on no clustering."""
    from hddm.data.partition import partition

    return partition(images, root / "whole", 1)[0]


@pytest.fixture(scope="session")
def ddpm_expert(root: Path, shards: Path) -> Path:
    """Predicts noise, as pretrained models do."""
    from hddm.training.expert import train_expert
    from tests.artefacts import expert_settings

    train_expert(shards / "shard_0", root / "ddpm", expert_settings("ddpm", prediction="epsilon"))
    return root / "ddpm"


@pytest.fixture(scope="session")
def flow_expert(root: Path, shards: Path) -> Path:
    from hddm.training.expert import train_expert
    from tests.artefacts import expert_settings

    train_expert(shards / "shard_1", root / "flow", expert_settings("flow"))
    return root / "flow"


@pytest.fixture(scope="session")
def class_expert(root: Path, whole: Path) -> Path:
    """Trained long enough to tell its two classes apart."""
    from hddm.training.expert import train_expert
    from tests.artefacts import expert_settings

    settings = expert_settings("flow", steps=300, batch_size=64, class_conditional=True)
    train_expert(whole, root / "classes", settings)
    return root / "classes"


@pytest.fixture(scope="session")
def router(root: Path, shards: Path) -> Path:
    from hddm.training.router import train_router
    from tests.artefacts import router_settings

    train_router(shards, root / "router", router_settings())
    return root / "router"


@pytest.fixture(scope="session")
def ensemble(root: Path, ddpm_expert: Path, flow_expert: Path, router: Path) -> Path:
    """One DDPM and one flow expert behind a router."""
    from hddm.experts.assembly import assemble

    assemble([ddpm_expert, flow_expert], root / "ensemble", router, strategy="nucleus-0.9")
    return root / "ensemble"


@dataclass(frozen=True)
class Trio:
    """Three class-conditional experts of one partition, in the order of their router's outputs."""

    shards: Path
    experts: list[Path]
    router: Path


@pytest.fixture(scope="session")
def trio(root: Path, images: Path) -> Trio:
    from hddm.data.partition import partition
    from hddm.training.expert import train_expert
    from hddm.training.router import train_router
    from tests.artefacts import expert_settings, router_settings

    folder = root / "trio"
    partition(images, folder / "shards", 3)
    for k, objective in enumerate(("ddpm", "flow", "flow")):
        settings = expert_settings(objective, steps=2, class_conditional=True, seed=k)
        train_expert(folder / "shards" / f"shard_{k}", folder / "experts" / f"e{k}", settings)
    train_router(folder / "shards", folder / "router", router_settings(steps=30))
    return Trio(
        folder / "shards", [folder / "experts" / f"e{k}" for k in range(3)], folder / "router"
    )


@pytest.fixture(scope="session")
def miniature(root: Path) -> "Finished":
    """A benchmark of two shards and one seed, with validation images; see `tests.benchmark_files.CONTENT`."""
    from tests.benchmark_files import finish

    return finish(root / "benchmark")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without weights of published networks, unless they lie in the system's own folder."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HDDM_INCEPTION", raising=False)
    return tmp_path / "home"


@pytest.fixture
def hddm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Command":
    """Exit code, standard output and standard error of a command, run in this process.

    Nothing is told of progress, however slow the machine: many tests want standard error empty.
    """
    from hddm_cli.app import app

    monkeypatch.setattr("hddm.utils.progress._SHORT", math.inf)
    monkeypatch.setattr("hddm.utils.progress._OFTEN", math.inf)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hddm", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            app()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return run
