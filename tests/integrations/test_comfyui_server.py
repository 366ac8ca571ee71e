"""The node that asks ``hddm serve``, with the service's own front behind a real address."""

import hashlib
import http.server
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image
from starlette.requests import Request

from hddm.pipelines.samples import sample_to_folder
from hddm.settings import SampleSettings
from hddm.utils.errors import HddmError
from integrations.comfyui.server import Server
from integrations.comfyui.service import Service
from tests.ensemble_files import flow_expert, write_ensemble
from tests.serving.test_front import front_of

TOKEN = "secret" * 6
ASKED: dict[str, Any] = {
    "prompt": "",
    "size": "auto",
    "n": 2,
    "seed": 3,
    "guidance_scale": 1.0,
    "strategy": "draw",
    "expert": "",
    "strength": 0.5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ensemble(tmp_path_factory.mktemp("served"), [flow_expert(0), flow_expert(1)])


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    front = front_of(folder, token=hashlib.sha256(TOKEN.encode()).hexdigest())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        response = await front(Request(scope, receive))
        await response(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    (socket,) = server.servers[0].sockets
    yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HDDM_TOKEN", TOKEN)


def test_pictures_are_those_of_hddm_sample(address: str, folder: Path, tmp_path: Path) -> None:
    (pictures,) = Server().make(address, **ASKED)
    settings = SampleSettings(num_images=2, seed=3, strategy="draw", device="cpu")
    sample_to_folder(folder, tmp_path / "out", settings)
    files = sorted((tmp_path / "out").glob("*.png"))
    wanted = [np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) for path in files[:2]]
    assert pictures.shape == (2, 4, 4, 3)
    assert (pictures * 255 - torch.from_numpy(np.stack(wanted))).abs().max() <= 1


def test_a_picture_of_strength_0_comes_back(address: str) -> None:
    picture = torch.rand(1, 4, 4, 3, generator=torch.Generator().manual_seed(0))
    (found,) = Server().make(address, **{**ASKED, "n": 1, "strength": 0.0}, image=picture)
    assert (found - picture).abs().max() < 0.01


def test_a_mask_keeps_what_it_leaves_free(address: str) -> None:
    picture = torch.rand(1, 4, 4, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 4, 4)
    mask[:, :, :2] = 1
    changes = {**ASKED, "n": 1, "strength": 1.0}
    (found,) = Server().make(address, **changes, image=picture, mask=mask)
    assert (found - picture)[:, :, 2:].abs().max() < 0.01
    assert (found - picture)[:, :, :2].abs().max() > 0.05


def test_what_the_server_refuses_is_said_in_its_words(address: str) -> None:
    with pytest.raises(HddmError, match="strategy") as error:
        Server().make(address, **{**ASKED, "strategy": "best"})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [("other", "its token is another one; .* HDDM_TOKEN"), ("", "wants a token; .* HDDM_TOKEN")],
)
def test_a_wrong_token_and_none_are_told_with_the_variable(
    address: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HDDM_TOKEN", value)
    with pytest.raises(HddmError, match=reason):
        Server().make(address, **ASKED)


@pytest.mark.parametrize("given", ["http://127.0.0.1:9", "127.0.0.1:9", "http://127.0.0.1:9/v1/"])
def test_no_server_is_told_with_the_command_that_starts_one(given: str) -> None:
    told = r"http://127\.0\.0\.1:9: .* start one with: hddm serve ENSEMBLE"
    with pytest.raises(HddmError, match=told):
        Server().make(given, **ASKED)


@pytest.mark.parametrize("given", ["", "  ", "http://", "ftp://here", "http://here:many"])
def test_what_is_no_address_is_told(given: str) -> None:
    with pytest.raises(HddmError, match=r"address .*: it must say where hddm serve listens, such"):
        Server().make(given, **ASKED)


def test_the_token_goes_to_this_machine_and_to_the_address_of_the_variable_alone(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workflow of a stranger may name any address."""
    elsewhere = address.replace("127.0.0.1", socket.gethostname())
    monkeypatch.setattr(
        socket, "create_connection", partial(_to_this_machine, socket.create_connection)
    )
    with pytest.raises(HddmError, match=r"HDDM_TOKEN goes to this machine alone; .* HDDM_ADDRESS"):
        Server().make(elsewhere, **ASKED)
    monkeypatch.setenv("HDDM_ADDRESS", elsewhere)
    (pictures,) = Server().make(elsewhere, **ASKED)
    assert len(pictures) == 2


def _to_this_machine(connect: Any, place: tuple[str, int], *more: Any, **options: Any) -> Any:
    return connect(("127.0.0.1", place[1]), *more, **options)


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"data": [{"url": "here"}]}'])
def test_answers_of_another_service_are_told(content: bytes) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(HddmError, match="its answer holds no pictures"):
            Server().make(f"http://127.0.0.1:{other.server_address[1]}", **ASKED)
        other.shutdown()


def test_another_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(HddmError, match="status 501, which is no answer of an hddm serve"):
            Server().make(f"http://127.0.0.1:{other.server_address[1]}", **ASKED)
        other.shutdown()


def test_an_expert_is_called_by_its_name_or_its_number(address: str) -> None:
    expert = {**ASKED, "strategy": ""}
    listed = Service(address).request("GET", "/v1/models")
    names = [one["id"] for one in listed["data"]][1:]
    short = names[1].partition("/")[2]
    found = []
    for name in (names[1], short, "1"):
        (pictures,) = Server().make(address, **{**expert, "expert": name})
        found.append(pictures)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    (other,) = Server().make(address, **{**expert, "expert": "0"})
    assert not torch.equal(found[0], other)
    with pytest.raises(HddmError, match=f"expert 'flow': the service at .* has .*{short}; leave"):
        Server().make(address, **{**expert, "expert": "flow"})


def test_more_pictures_than_one_request_may_have_are_those_of_one_run(address: str) -> None:
    (many,) = Server().make(address, **{**ASKED, "n": 12})
    (few,) = Server().make(address, **ASKED)
    assert len(many) == 12
    assert torch.equal(many[:2], few)
    assert len({bytes(one.numpy()) for one in many}) == 12


class Cancelled(BaseException):
    """What ComfyUI raises."""


def test_cancelling_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def throw() -> None:
        raise Cancelled

    management = SimpleNamespace(throw_exception_if_processing_interrupted=throw)
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(Cancelled):
            Server().make(f"http://127.0.0.1:{silent.getsockname()[1]}", **ASKED)
        connection, _ = silent.accept()
        with connection:
            connection.settimeout(10)
            # The request was sent, and then nobody waits for its answer.
            while connection.recv(4096):
                pass


def test_a_mask_without_a_picture_is_refused(address: str) -> None:
    with pytest.raises(HddmError, match="connect image as well"):
        Server().make(address, **ASKED, mask=torch.ones(1, 4, 4))
