"""Requests to the front of a service, whose workers are in this process."""

import asyncio
import base64
import hashlib
import io
import itertools
import json
import random
import re
import shutil
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import ActorDiedError, TaskCancelledError
from starlette.requests import Request

from hddm.experts.assembly import assemble
from hddm.pipelines.samples import sample_to_folder
from hddm.serving.front import Front
from hddm.serving.requests import refusal_of
from hddm.serving.service import names_of, serve
from hddm.serving.workers import SampleJob, VelocityJob, Worker
from hddm.settings import SampleSettings, ServeSettings
from hddm.utils.errors import HddmError, UsageError
from tests.artefacts import refusal
from tests.ensemble_files import (
    CLASSES,
    WEIGHTS,
    calibration_of,
    flow_expert,
    saved,
    three_ends,
    write_ensemble,
    write_mixed,
    write_text,
    write_unlike,
)
from tests.paris_files import write_paris

IMAGES = "/v1/images/generations"
GUIDE = Path(__file__).parents[2] / "docs/guides/serve.md"
STEPS = 4
TOKEN = "7d4a1f0c9a9a4a8a8e0f3a5c0f2f6b1e"


class Handle:
    """A worker in this process, asked as a handle of Ray Serve is; the first ``deaths`` calls are lost."""

    def __init__(self, worker: Worker, deaths: int = 0) -> None:
        self.worker, self.deaths, self.jobs = worker, deaths, list[SampleJob | VelocityJob]()
        self.answer = self.ready = self

    def remote(self, job: SampleJob | VelocityJob | None = None) -> Any:
        if job is None:
            return self.worker.ready()
        self.jobs.append(job)
        if self.deaths:
            self.deaths -= 1
            raise ActorDiedError
        return asyncio.ensure_future(self.worker.answer(job))


def front_of(folder: Path, deaths: int = 0, token: str | None = None, **limits: Any) -> Front:
    settings = ServeSettings(**{"device": "cpu", **limits})
    names = enumerate(names_of(folder))
    workers = {name: Handle(Worker(str(folder), k, settings, 1), deaths) for k, name in names}
    assert {asyncio.run(handle.worker.ready()) for handle in workers.values()} == {""}
    return Front(str(folder), settings, 1, token, workers)


def talk(front: Front, talks: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """What ``talks`` returns, with a client of this front."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        response = await front(request)
        await response(scope, receive, send)

    async def main() -> Any:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://front"
        ) as client:
            try:
                return await talks(client)
            finally:
                # A thread of a request that ended may ask once more, and wait for ever for a closed loop.
                for pool in (front.threads, front.ensemble._threads):
                    await asyncio.to_thread(pool.shutdown)
                front.threads = ThreadPoolExecutor(front.limits.max_queue + 1)
                front.ensemble._threads = ThreadPoolExecutor(64)

    return asyncio.run(main())


def ask(front: Front, **body: Any) -> httpx.Response:
    """The answer to one request for images."""
    return talk(front, lambda client: client.post(IMAGES, json={"steps": STEPS, "seed": 3, **body}))


def files_in(answer: httpx.Response) -> list[bytes]:
    assert answer.status_code == 200, answer.text
    return [base64.b64decode(one["b64_json"]) for one in answer.json()["data"]]


def sampled(folder: Path, out: Path, **settings: Any) -> list[bytes]:
    """Files that ``hddm sample`` writes with these settings."""
    sample_to_folder(folder, out, SampleSettings(steps=STEPS, seed=3, **settings))
    return [path.read_bytes() for path in sorted(out.glob("*.png"))]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three flow experts of classes."""
    experts = [flow_expert(seed, num_classes=3) for seed in range(3)]
    return write_ensemble(tmp_path_factory.mktemp("classes"), experts)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def front(classes: Path) -> Front:
    """A front of `classes` that tests leave as it was."""
    return front_of(classes)


DRAW, GUIDED = {"strategy": "draw"}, {"guidance_scale": 3.0}
FULL = {"strategy": "full", "router_every": 2}
DOG, TWO, CAT = {"class_labels": "dog"}, {"class_labels": "2"}, {"prompts": ("a cat",)}
NEGATIVE = {"negative_prompt": "a dog", **GUIDED}
RESCALED = GUIDED | {
    "guidance_interval": [0.1, 0.8],
    "guidance_rescale": 0.5,
    "cfg_channels": 1,
    "shift": 3.0,
}
WAYS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "classes": [
        ({"prompt": "dog"}, DOG),
        ({"prompt": "dog", **GUIDED, **DRAW}, DOG | GUIDED | DRAW),
        ({"prompt": "dog", "start": 7, "solver": "euler"}, DOG | {"start": 7, "solver": "euler"}),
        ({"prompt": "dog", "model": "ensemble/2"}, DOG | {"expert": 2}),
        ({"prompt": "dog", **RESCALED, **DRAW}, DOG | RESCALED | DRAW),
        ({"prompt": "dog", **RESCALED, **FULL}, DOG | RESCALED | FULL),
        ({"prompt": ""}, {}),
    ],
    "text": [
        ({}, {}),
        ({"prompt": ""}, {"prompts": ("",)}),
        ({"prompt": "a cat", **NEGATIVE}, CAT | NEGATIVE),
        ({"prompt": "a cat", **GUIDED, **DRAW}, CAT | GUIDED | DRAW),
    ],
    "mixed": [({"prompt": "2"}, TWO), ({"prompt": "2", **DRAW, **GUIDED}, TWO | DRAW | GUIDED)],
}


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*only the shares do")
@pytest.mark.parametrize("kind", WAYS)
def test_images_are_those_of_hddm_sample(
    kind: str, classes: Path, text: Path, tmp_path: Path
) -> None:
    """By class, by prompt, and of DDPM beside flow, each with its own numbering of classes."""
    folder = {"classes": classes, "text": text}.get(kind) or write_mixed(tmp_path)
    front = front_of(folder, batching=False)
    for place, (body, settings) in enumerate(WAYS[kind]):
        found = files_in(ask(front, n=5, **body))
        assert found == sampled(folder, tmp_path / str(place), num_images=5, **settings), body
        assert len(set(found)) == 5


@pytest.mark.parametrize("strategy", ["draw", "full", "commit-0.5"])
def test_more_images_than_a_batch_are_the_batches_of_hddm_sample(
    classes: Path, tmp_path: Path, strategy: str
) -> None:
    front = front_of(classes, batching=False, max_images=11, batch_size=4)
    body = {"prompt": "dog", "strategy": strategy, "n": 11}
    settings = {"class_labels": "dog", "strategy": strategy, "num_images": 11, "batch_size": 4}
    assert files_in(ask(front, **body)) == sampled(classes, tmp_path / "out", **settings)
    sizes = [len(job) for handle in front.workers for job in handle.jobs]
    assert max(sizes) <= 4
    if strategy == "draw":
        assert {4, 8} <= set(itertools.accumulate(sizes))


def test_experts_of_several_sizes_and_pairs_by_noise_are_served(tmp_path: Path) -> None:
    """Two sizes of images; of the larger a pair, each for a part of t."""
    kinds: list[tuple[int, dict[str, Any]]] = [(4, {})]
    kinds += [(8, {"noise_range": part}) for part in ((0.0, 0.6), (0.6, 1.0))]
    folders = [
        saved(tmp_path / f"one{k}", flow_expert(k, facts, sample_size=size))
        for k, (size, facts) in enumerate(kinds)
    ]
    out = tmp_path / "ensemble"
    assemble(folders, out, strategy="draw", domain=[["one1", "one2"]], share={"one0": 0.5})
    front = front_of(out, batching=False)
    found = files_in(ask(front, prompt="", n=6))
    assert found == sampled(out, tmp_path / "out", num_images=6)
    # The small ones were one message each way.
    small, low, high = (handle.jobs for handle in front.workers)
    assert len(small) == 1
    assert min(len(low), len(high)) > 1


@pytest.mark.filterwarnings("ignore:.*only the shares do")
def test_an_expert_without_text_gets_no_request_of_a_prompt(tmp_path: Path) -> None:
    folder = write_unlike(tmp_path)
    front = front_of(folder, batching=False)
    for place, strategy in enumerate(("draw", "full")):
        body = {"prompt": "a cat", "strategy": strategy, "n": 6}
        made = sampled(
            folder, tmp_path / str(place), num_images=6, prompts=("a cat",), strategy=strategy
        )
        assert files_in(ask(front, **body)) == made
    assert [bool(handle.jobs) for handle in front.workers] == [True, False, True]
    answer = ask(front, prompt="a cat", model="ensemble/1")
    assert (answer.status_code, answer.json()["error"]["message"][:30]) == (
        400,
        "expert 1 cannot take the promp",
    )


def test_experts_of_one_name_have_a_worker_each(tmp_path: Path) -> None:
    experts = [tmp_path / owner / "x" for owner in ("a", "b")]
    for seed, folder in enumerate(experts):
        saved(folder, flow_expert(seed))
    assemble(experts, tmp_path / "whole")
    front = front_of(tmp_path / "whole")
    images = [files_in(ask(front, model=f"whole/x-{k}")) for k in range(2)]
    assert images[0] != images[1]


def test_requests_of_one_moment_are_one_batch_and_change_an_image_by_rounding_only(
    classes: Path,
) -> None:
    front = front_of(classes)
    bodies = [
        {"prompt": CLASSES[k % 3], "seed": k, "strategy": "draw", "steps": STEPS} for k in range(24)
    ]
    batches = list[int]()
    for handle in front.workers:

        def counted(batch: Sequence[Any], run: Callable[..., Any] = handle.worker._run) -> Any:
            batches.append(sum(len(one.job) for one in batch))
            return run(batch)

        handle.worker._run = counted

    async def together(client: httpx.AsyncClient) -> Any:
        return await asyncio.gather(*(client.post(IMAGES, json=body) for body in bodies))

    found = [files_in(answer)[0] for answer in talk(front, together)]
    alone = front_of(classes, batching=False)
    for body, image in zip(bodies, found, strict=True):
        (expected,) = files_in(ask(alone, **body))
        assert np.abs(_levels(image) - _levels(expected)).max() <= 1
    assert sum(batches) == 24
    assert len(batches) <= 12
    values = metrics(front)
    assert sum(values["hddm_expert_images_total", str(k)] for k in range(3)) == 24


def _levels(png: bytes) -> "np.ndarray[Any, Any]":
    return np.asarray(Image.open(io.BytesIO(png))).astype(int)


def metrics(front: Front) -> dict[tuple[str, str], float]:
    """Values of /metrics by name and label."""
    text = talk(front, lambda client: client.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            label = next((value for key, value in one.labels.items() if key != "le"), "")
            found[one.name, label] = one.value
    return found


def test_a_request_that_breaks_a_batch_breaks_no_other(text: Path) -> None:
    """Guidance and all else alike, one prompt has a seed that is broken in its worker."""
    front = front_of(text)
    worker = front.workers[0].worker
    run = worker._run

    def broken(batch: Sequence[Any]) -> Any:
        if any(one.job.seed == 13 for one in batch):
            raise RuntimeError("out of memory")
        return run(batch)

    worker._run = broken

    async def together(client: httpx.AsyncClient) -> Any:
        bodies = [
            {"prompt": "a cat", "model": "ensemble/0", "seed": seed, "steps": 2}
            for seed in (12, 13, 14)
        ]
        return await asyncio.gather(*(client.post(IMAGES, json=body) for body in bodies))

    assert [answer.status_code for answer in talk(front, together)] == [200, 500, 200]


@pytest.mark.integration
def test_what_a_lost_worker_had_to_do_is_asked_again(
    classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hddm.serving.front.AGAIN", 0.01)
    for strategy in ("draw", "full"):
        body = {"prompt": "cat", "n": 4, "strategy": strategy}
        whole = files_in(ask(front_of(classes, batching=False), **body))
        front = front_of(classes, deaths=3, batching=False)
        assert files_in(ask(front, **body)) == whole
        assert sum(metrics(front)["hddm_worker_lost_total", str(k)] for k in range(3)) >= 3
    monkeypatch.setattr("hddm.serving.front.TRIES", 2)
    assert ask(front_of(classes, deaths=3), prompt="cat", model="ensemble/1").status_code == 503


@pytest.mark.integration
def test_an_expert_that_cannot_be_read_is_refused_at_once_until_it_is_mended(
    classes: Path, tmp_path: Path
) -> None:
    front = front_of(folder := Path(shutil.copytree(classes, tmp_path / "ensemble")))
    weights = folder / "experts/1" / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    front.workers[1] = Handle(Worker(str(folder), 1, ServeSettings(device="cpu"), 1))
    assert f"{WEIGHTS}: cannot be read" in asyncio.run(front.workers[1].worker.ready())
    for strategy in ("draw", "full"):
        answer = ask(front, prompt="cat", n=8, strategy=strategy)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "expert 1 cannot be read; the log says why"
    assert ask(front, prompt="cat", model="ensemble/0").status_code == 200
    health = talk(front, lambda client: client.get("/healthz"))
    assert (health.status_code, health.json()["missing"]) == (503, ["1"])
    weights.write_bytes(whole)
    assert ask(front, prompt="cat", model="ensemble/1").status_code == 200
    assert talk(front, lambda client: client.get("/healthz")).status_code == 200


@pytest.mark.parametrize("strategy", ["draw", "full"])
def test_damaged_weights_are_no_fault_of_a_request(classes: Path, strategy: str) -> None:
    front = front_of(classes)
    for handle in front.workers:
        for weights in handle.worker.field.network.parameters():
            weights.data.fill_(torch.nan)
    for guided in ({}, GUIDED):
        answer = ask(front, prompt="cat", n=4, strategy=strategy, **guided)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


@pytest.mark.parametrize("strategy", ["draw", "full"])
def test_a_client_that_leaves_costs_nothing_more(classes: Path, strategy: str) -> None:
    front = front_of(classes, max_steps=10_000)

    async def leave(client: httpx.AsyncClient) -> Any:
        body = {"prompt": "cat", "steps": 10_000, "seed": 1, "strategy": strategy}
        task = asyncio.ensure_future(client.post(IMAGES, json=body))
        while not any(handle.jobs for handle in front.workers):
            await asyncio.sleep(0.01)
        assert front.active == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert front.active == 0
        # The workers are free for the next one at once.
        return await client.post(IMAGES, json={"prompt": "cat", "steps": 2, "strategy": strategy})

    asked = asyncio.wait_for
    assert talk(front, lambda client: asked(leave(client), 30)).status_code == 200


def test_a_full_queue_turns_requests_away_and_a_request_ends_in_time(classes: Path) -> None:
    front = front_of(classes, max_queue=2)

    async def crowd(client: httpx.AsyncClient) -> Any:
        body = {"prompt": "cat", "steps": 50, "strategy": "draw"}
        return await asyncio.gather(
            *(client.post(IMAGES, json=body | {"seed": k}) for k in range(6))
        )

    answers = talk(front, crowd)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]
    turned = next(answer for answer in answers if answer.status_code == 429)
    assert int(turned.headers["retry-after"]) >= 1
    front = front_of(classes, timeout=0.2, max_steps=10_000)
    assert ask(front, prompt="cat", steps=10_000, strategy="draw").status_code == 504


def test_a_token_is_asked_for(classes: Path) -> None:
    front = front_of(classes, token=hashlib.sha256(TOKEN.encode()).hexdigest())

    async def knock(client: httpx.AsyncClient) -> Any:
        given = [{}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}]
        given += [{"Authorization": f"Bearer {TOKEN}"}]
        *refused, models = [await client.get("/v1/models", headers=one) for one in given]
        others = [await client.get(path) for path in ("/healthz", "/metrics")]
        return [one.status_code for one in (*refused, *others)], [
            one["id"] for one in models.json()["data"]
        ]

    models = ["ensemble", "ensemble/0", "ensemble/1", "ensemble/2"]
    assert talk(front, knock) == ([401, 401, 401, 200, 401], models)


def test_what_cannot_be_served_is_refused_before_ray_starts(
    classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would share the port with the other service, or try again and again."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"`port` {port}: cannot listen on 127.0.0.1" in refusal(serve, classes, port=port)
    # A file's line break is no token.
    monkeypatch.setenv("HDDM_TOKEN", " \n")
    with pytest.raises(UsageError, match="set HDDM_TOKEN"):
        serve(classes, host="0.0.0.0")
    write_paris(tmp_path / "paris")
    told = refusal(serve, tmp_path / "paris")
    assert "paris: lacks vae, text_encoder and tokenizer to make images of expert 0" in told
    assert f"add what is missing (as {tmp_path / 'paris/vae'}, {tmp_path}" in told


def test_the_requests_of_the_guide_are_answered_by_an_ensemble_as_the_quickstart_s(
    tmp_path: Path,
) -> None:
    """By experts of neither text nor class; their images are those of hddm sample."""
    front = front_of(write_ensemble(tmp_path, [flow_expert(0), flow_expert(1)]), batching=False)
    (body,) = re.findall(r"^curl .*/generations -d '(.*)'$", GUIDE.read_text(), re.MULTILINE)
    answer = talk(front, lambda client: client.post(IMAGES, content=body))
    assert len(files_in(answer)) == json.loads(body)["n"]
    assert files_in(ask(front, n=3)) == sampled(
        tmp_path / "ensemble", tmp_path / "out", num_images=3
    )
    assert "the model is unconditional" in ask(front, prompt="cat").json()["error"]["message"]
    for strategy in ("full", "draw"):
        assert ask(front, prompt="", guidance_scale=3.0, strategy=strategy).status_code == 400


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "class": ({"prompt": "horse"}, 400, "it names none of cat, dog, 7"),
    "model": ({"prompt": "cat", "model": "ensemble/9"}, 404, "there is no model 'ensemble/9'"),
    "size": ({"prompt": "cat", "size": "1024x1024"}, 400, "this ensemble makes 4x4; or pass auto"),
    "many": ({"prompt": "cat", "n": 11}, 400, "n is 11, and this service makes at most 10"),
    "key": ({"prompt": "cat", "sed": 1}, 400, "request: unknown key 'sed'; did you mean 'seed'?"),
    "negative": (
        {"prompt": "cat", "negative_prompt": "dog"},
        400,
        "no expert reads text; drop the option",
    ),
    "weak": ({"prompt": "cat", "guide_by": "weak"}, 400, "has no effect at `guidance_scale` 1"),
    "strategy": (
        {"prompt": "cat", "strategy": "top-9"},
        400,
        "top-9 needs 9 experts and there are 3",
    ),
}


PARAMS = {
    "class": "prompt",
    "model": "model",
    "size": "size",
    "many": "n",
    "key": "sed",
    "negative": "negative_prompt",
    "weak": "guide_by",
    "strategy": "strategy",
}
"""The field that each of `WRONG` is refused for."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", "one"),
        ("n", 0),
        ("seed", -1),
        ("steps", 2**70),
        ("size", "wide"),
        ("solver", "magic"),
        ("strategy", "top-0"),
        ("guidance_scale", 5000),
        ("guidance_interval", [0.9, 0.1]),
        ("guidance_rescale", 7),
        ("router_every", 0),
        ("response_format", "url"),
        ("output_format", "jpeg"),
        ("shift", -1),
        ("prompt", 5),
        ("quality", "high"),
    ],
)
def test_a_field_of_a_wrong_value_is_named(front: Front, name: str, value: object) -> None:
    answer = ask(front, **{"prompt": "cat"} | {name: value})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == name
    assert name in error["message"]
    assert name == "quality" or str(value).strip("[]").split(",")[0] in error["message"]


def test_what_an_error_has_in_further_lines_is_said_too() -> None:
    error = HddmError("`strategy` full: cannot run", ["expert 0 has no router", "expert 1 neither"])
    refusal = refusal_of(error)
    assert refusal.body["error"]["param"] == "strategy"
    assert refusal.message.endswith("cannot run expert 0 has no router expert 1 neither")


def test_a_strategy_for_one_expert_is_refused(tmp_path: Path) -> None:
    alone = front_of(write_ensemble(tmp_path, [flow_expert(0, num_classes=3)]))
    answer = ask(alone, prompt="cat", strategy="full")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "strategy"
    told = "`strategy` full: has no effect, since there is one expert; drop it"
    assert answer.json()["error"]["message"] == told


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_told_what_is_wrong(front: Front, name: str) -> None:
    body, status, words = WRONG[name]
    answer = ask(front, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
    assert words in error["message"]
    assert error["param"] == PARAMS[name]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("event", "status"),
    [(None, 408), ({"type": "http.disconnect"}, 400), (TaskCancelledError(), 400)],
)
def test_a_body_that_does_not_come_is_no_failure_of_the_service(
    front: Front, monkeypatch: pytest.MonkeyPatch, event: Any, status: int
) -> None:
    """A client that leaves is an event or, from Ray, an exception."""
    monkeypatch.setattr("hddm.serving.front.BODY", 0.05)

    async def receive() -> Any:
        if event is None:
            await asyncio.Event().wait()
        if isinstance(event, Exception):
            raise event
        return event

    scope = {"type": "http", "method": "POST", "path": IMAGES, "headers": [], "query_string": b""}
    answer = asyncio.run(asyncio.wait_for(front(Request(scope, receive)), 30))
    assert answer.status_code == status


def test_malformed_requests_are_refused_each(front: Front) -> None:
    async def throw(client: httpx.AsyncClient) -> list[tuple[int, object]]:
        found = []
        for method, path, content in malformed():
            answer = await client.request(method, path, content=content)
            found.append((answer.status_code, (method, path, content[:200])))
        return found

    wrong = [one for one in talk(front, throw) if not 400 <= one[0] < 500]
    assert not wrong


def malformed() -> list[tuple[str, str, bytes]]:
    """Requests that no service could answer: method, path and body."""
    whole, draw = json.dumps({"prompt": "cat", "n": 1}).encode(), random.Random(0)
    bodies = [draw.randbytes(length) for length in range(1, 200, 10)]
    bodies += [whole[:length] for length in range(len(whole))]
    bodies += [b"[" * depth + b"1" for depth in (1, 1000, 60_000)]
    bodies += [b'{"prompt": "' + b"a" * 70_000 + b'"}', b'{"prompt": "half \\ud800"}']
    keys = ["n", "size", "steps", "seed", "start", "solver", "strategy", "guidance_scale", "model"]
    keys += ["response_format", "output_format", "__class__", "init_image", "quality"]
    values: list[Any] = [[], {}, [[]], "", "x" * 5000, "\ud800", "../../etc/passwd", 1e400]
    pairs = [(key, value) for key in keys for value in values]
    pairs += [(key, value) for key in ("n", "steps") for value in (-1, 0, 0.5, 2**70)]
    bodies += [json.dumps({"prompt": "cat", key: value}).encode() for key, value in pairs]
    paths = (IMAGES, "/v1/images", "/v1/../etc", "/%2e%2e/x", "/v1/models/x", "/\u00e9")
    others = [
        (method, path, b"") for method in ("GET", "PUT", "DELETE", "OPTIONS") for path in paths
    ]
    return [("POST", IMAGES, body) for body in bodies] + others


def test_experts_of_ddpm_begin_where_hddm_sample_does(tmp_path: Path) -> None:
    """Two ends of schedules and one of t = 1; the first step of a mix is the front's own."""
    folders = []
    for k, expert in enumerate(three_ends()):
        whole = replace(expert, calibration=calibration_of(k))
        folders.append(saved(tmp_path / f"one{k}", whole))
    for number, strategy in ((3, "draw"), (2, "full")):
        out = tmp_path / strategy
        assemble(folders[:number], out, strategy=strategy, router="moments")
        front = front_of(out, batching=False)
        made = sampled(out, tmp_path / f"{strategy}-samples", num_images=6)
        assert files_in(ask(front, prompt="", n=6)) == made
        assert len({*made}) == 6
        assert all(handle.jobs for handle in front.workers)
