"""The front of a service: answers requests with what its workers compute.

It holds text encoders, router and VAEs. Under ``draw`` each image is one message to the worker of its expert
and one back; for other strategies it integrates, and at each step states go to the workers of weight. What a
lost worker had to do is asked again: a sample depends on seed and index alone.
"""

import asyncio
import contextlib
import hashlib
import hmac
import io
import json
import logging
import math
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hddm.conditions import Conditions
from hddm.data.images import save_png, to_bytes
from hddm.evaluation.expert_use import ExpertUse
from hddm.networks.wrappers import TEXT_CONDITIONS
from hddm.noise import Seeded
from hddm.pipelines.encoding import repeated
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.running import Batch, NotFinite, Plan, gathered, run
from hddm.sampling import batches, plan
from hddm.serving.answers import FAILED, Refusal
from hddm.serving.requests import LARGEST_BODY, ImageRequest, read_request, refuse_more
from hddm.serving.workers import Answer, RemoteEnsemble, SampleJob, VelocityJob
from hddm.utils.errors import HddmError, counted, did_you_mean, one_line, with_arguments
from hddm.utils.processes import Report
from hddm.utils.records import WHOLE

AGAIN = 0.25
"""Seconds until a worker that was lost is asked again."""
TRIES = 20
MESSAGES = 2
"""Messages with states that are under way to an expert at a time."""
BODY = 10.0
"""Seconds until a body must be there, since each that is not takes a place among the calls of Ray Serve."""
TOLD = 20
"""Latest requests that the time of a waiting one is estimated from."""

WAIT = 2.0
"""Seconds until a worker that does not answer is asked whether it is there, and that it has to say so."""
RESTART = 60.0
"""Seconds that a worker that was lost has to come back, before its requests are refused."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Call:
    """What the images of a request are made of."""

    wanted: ImageRequest
    how: Plan
    batches: Sequence[Batch]


@dataclass(frozen=True)
class Limits:
    """Bounds of what is accepted, and of what is computed together."""

    images: int = 10
    """Images of a request."""
    steps: int = 250
    """Solver steps of a request."""
    queue: int = 64
    """Requests that wait or run; one more is answered with 429."""
    seconds: float = 600.0
    """Time for a request."""
    batch_size: int = 16
    """Samples that a worker computes together, and those of a batch of ``hddm sample``."""
    is_batched: bool = True
    """Compute several requests together."""


class Front:
    """Answers requests, as the ingress deployment of Ray Serve.

    Args:
        folder: the ensemble.
        dtype: of router, text encoders and VAEs.
        threads: of torch.
        limits: see there.
        token: SHA-256 of the bearer token in hexadecimal; None lets everybody in.
        workers: handles of the experts' deployments by their names, in their order.
    """

    def __init__(
        self,
        folder: str,
        dtype: torch.dtype,
        threads: int,
        limits: Limits,
        token: str | None,
        workers: Mapping[str, Any],
    ) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        # Ray shows what a worker writes to its standard error.
        logging.basicConfig(format="%(message)s")
        logging.getLogger("hddm").setLevel(logging.INFO)
        torch.set_num_threads(threads)
        self.limits, self.token = limits, token
        self.experts, self.workers = list(workers), list(workers.values())
        self.name = Path(folder).name
        # No weights of experts are read, since their networks are never called here.
        self.pipeline = HDDMPipeline.from_pretrained(folder, dtype=dtype)
        self.ensemble = RemoteEnsemble(self.pipeline.ensemble, self._velocity)
        self.threads = ThreadPoolExecutor(
            limits.queue + 1, "hddm-front", initializer=torch.set_num_threads, initargs=(threads,)
        )
        self.active, self.created = 0, int(time.time())
        self.loop: asyncio.AbstractEventLoop | None = None
        self.outbox: list[list[tuple[VelocityJob, asyncio.Future[Any]]]] = [[] for _ in workers]
        self.senders: list[set[asyncio.Task[None]]] = [set() for _ in workers]
        self.times: list[float] = []
        self.missing = [0.0 for _ in workers]
        """Monotonic seconds since which a worker has not answered; 0 where it has."""
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("hddm_requests", "Requests answered", ["status"], registry=registry)
        self.seconds = Histogram("hddm_request_seconds", "Seconds of a request for images", registry=registry)
        self.queue = Gauge("hddm_queue", "Requests that wait or run", registry=registry)
        self.queue.set_function(lambda: self.active)
        self.images = Counter(
            "hddm_expert_images",
            "Images by the expert that made them, in parts by weight",
            ["expert"],
            registry=registry,
        )
        self.batches = Histogram(
            "hddm_batch_size", "Samples that an expert computed together", ["expert"],
            buckets=[2**k for k in range(9)], registry=registry,
        )  # fmt: skip
        self.lost = Counter("hddm_worker_lost", "Calls whose worker was lost", ["expert"], registry=registry)
        for name in self.experts:
            for metric in (self.images, self.batches, self.lost):
                metric.labels(name)

    async def __call__(self, request: Any) -> Any:
        """Answer a request (of Starlette)."""
        from starlette.responses import JSONResponse

        self.loop = asyncio.get_running_loop()
        answers = {
            "/healthz": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/v1/images/generations": ("POST", self._generate),
        }
        path, refusal = request.url.path, None
        try:
            if path != "/healthz":
                self._check_token(request)
            if path not in answers:
                raise Refusal(404, f"{one_line(path, 100)}: there is {', '.join(answers)}")
            method, answer = answers[path]
            if request.method not in (method, "HEAD" if method == "GET" else method):
                raise Refusal(405, f"{one_line(request.method, 20)} {path}: takes {method}")
            response = await answer(request)
        except Refusal as error:
            refusal = error
        except Exception:
            log.exception("%s %s", request.method, path)
            refusal = FAILED
        if refusal is not None:
            headers = {429: {"Retry-After": str(self._patience)}, 401: {"WWW-Authenticate": "Bearer"}}
            response = JSONResponse(refusal.body, refusal.status, headers.get(refusal.status))
        self.requests.labels(str(response.status_code)).inc()
        return response

    def _check_token(self, request: Any) -> None:
        if self.token is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        found = hashlib.sha256(given.strip().encode()).hexdigest()
        if kind.lower() != "bearer" or not hmac.compare_digest(found, self.token):
            raise Refusal(401, "send the service's token: Authorization: Bearer TOKEN")

    @property
    def _patience(self) -> int:
        """Seconds after which a request that was turned away may find room."""
        return math.ceil(sum(self.times) / len(self.times)) if self.times else 1

    async def _health(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        there = await asyncio.gather(*map(self._is_there, range(len(self.workers))))
        missing = [name for name, is_up in zip(self.experts, there, strict=True) if not is_up]
        content = {"status": "waits for experts" if missing else "ok", "missing": missing}
        return JSONResponse(content, 503 if missing else 200)

    async def _is_there(self, k: int) -> bool:
        try:
            is_there = not await asyncio.wait_for(self.workers[k].ready.remote(), WAIT)
        except Exception:  # whatever kept it from answering
            is_there = False
        self.missing[k] = 0.0 if is_there else self.missing[k] or time.monotonic()
        return is_there

    async def _metrics(self, request: Any) -> Any:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        from starlette.responses import Response

        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        names = [self.name, *(f"{self.name}/{expert}" for expert in self.experts)]
        shared = {"object": "model", "created": self.created, "owned_by": "hddm"}
        return JSONResponse({"object": "list", "data": [{"id": name, **shared} for name in names]})

    async def _generate(self, request: Any) -> Any:
        from ray.exceptions import TaskCancelledError
        from starlette.responses import JSONResponse, StreamingResponse

        class Stream(StreamingResponse):
            async def listen_for_disconnect(self, receive: Any) -> None:
                # Ray raises where a client left, and would write it to the log.
                with contextlib.suppress(TaskCancelledError):
                    await super().listen_for_disconnect(receive)

        wanted = read_request(await _body(request), self.limits.images, self.limits.steps)
        expert = self._check(wanted)
        if self.active >= self.limits.queue:
            raise Refusal(429, f"{self.active} requests wait or run; try again in {self._patience} s")
        if not wanted.stream:
            images = await self._made(wanted, expert, lambda step: None)
            found = [_datum(wanted, *image) for image in images]
            return JSONResponse({"created": int(time.time()), "data": found})
        steps, loop = asyncio.Queue[int | None](), asyncio.get_running_loop()

        def tell(step: int) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, step)

        task = asyncio.ensure_future(self._made(wanted, expert, tell))
        task.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            # What is refused before the first step has a status of its own.
            if await steps.get() is None:
                await task
        except asyncio.CancelledError:
            task.cancel()
            raise
        return Stream(self._events(wanted, task, steps), media_type="text/event-stream")

    def _check(self, wanted: ImageRequest) -> int | None:
        """Index of the expert that a request asks for, None for all; raises a `Refusal`."""
        height, width = self.pipeline.image_size
        if wanted.size not in ("auto", size := f"{width}x{height}"):
            raise Refusal(
                400, f"size is {wanted.size!r}, and this ensemble makes {size}; or pass auto", "size"
            )
        if wanted.model in (None, self.name):
            return None
        names = [f"{self.name}/{expert}" for expert in self.experts]
        if wanted.model not in names:
            near = did_you_mean(str(wanted.model), [self.name, *names])
            known = f"GET /v1/models lists them{near}"
            raise Refusal(404, f"there is no model {one_line(repr(wanted.model), 60)}; {known}", "model")
        return names.index(wanted.model)

    @contextlib.asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """Block of a request that counts as active, and ends in time."""
        self.active += 1
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.seconds):
                yield
            taken = time.monotonic() - begun
            self.seconds.observe(taken)
            self.times = [*self.times, taken][-TOLD:]
        except TimeoutError as error:
            raise Refusal(
                504, f"took more than {self.limits.seconds:g} s; ask for fewer images or steps"
            ) from error
        except Refusal:
            raise
        except HddmError as error:
            raise Refusal(400, with_arguments(error.message)) from error
        finally:
            self.active -= 1

    async def _events(
        self,
        wanted: ImageRequest,
        task: "asyncio.Task[Sequence[tuple[int, bytes]]]",
        steps: "asyncio.Queue[int | None]",
    ) -> AsyncIterator[str]:
        """Server-sent events of a request: its steps, then its images, or an error."""
        kind = "image_generation"
        try:
            yield _event(f"{kind}.queued", requests=self.active)
            of = plan(self.ensemble, steps=wanted.steps).steps
            while (step := await steps.get()) is not None:
                yield _event(f"{kind}.progress", step=step, steps=of)
            for image in task.result():
                yield _event(f"{kind}.completed", created_at=int(time.time()), **_datum(wanted, *image))
        except Refusal as refusal:
            yield _event("error", **refusal.body)
        except Exception:
            log.exception("in the middle of a stream")
            yield _event("error", **FAILED.body)
        finally:
            task.cancel()

    async def _made(
        self, wanted: ImageRequest, expert: int | None, on_step: Report
    ) -> Sequence[tuple[int, bytes]]:
        """Numbers and PNG files of a request's images; ``on_step`` is told 0 once it is prepared."""
        async with self._admitted():
            call = await self._in_thread(self._prepared, wanted, expert)
            on_step(0)
            try:
                return await self._make(call, on_step)
            except NotFinite as error:
                if error.by_guidance:
                    raise
                # Damaged weights are no fault of the request.
                raise RuntimeError(error.message) from error

    def _prepared(self, wanted: ImageRequest, expert: int | None) -> _Call:
        """A request with its plan, its conditions encoded, and its experts chosen."""
        asked = self._encode(wanted)
        how = plan(self.ensemble, **wanted.plan_arguments, expert=expert, noise=Seeded(wanted.seed))
        refuse_more("steps", how.steps, self.limits.steps)
        numbers = range(wanted.start, wanted.start + wanted.n)
        return _Call(wanted, how, list(batches(how, numbers, asked, self.limits.batch_size)))

    def _encode(self, wanted: ImageRequest) -> Conditions:
        """Conditions of a request, one row per image."""
        pipeline, guided = self.pipeline, wanted.guidance.by_condition
        if wanted.negative_prompt is not None and not guided:
            raise HddmError("negative_prompt needs a guidance_scale other than 1, and guide_by condition")
        facts = pipeline.experts.facts
        is_read = any(TEXT_CONDITIONS[0] in one.conditions for one in facts)
        prompt = wanted.prompt if is_read else wanted.prompt or None
        if prompt in pipeline.ensemble.classes:
            asked = pipeline.encode(class_labels=[prompt])
        elif prompt and not any(one.conditions for one in facts):
            raise HddmError("this ensemble takes no prompt; leave it out")
        else:
            asked = pipeline.encode(prompt, None, wanted.negative_prompt, guided)
        return repeated(asked, 1, wanted.n)[0]

    async def _make(self, call: _Call, on_step: Report) -> Sequence[tuple[int, bytes]]:
        """Numbers and PNG files of the images."""
        use, num, names = ExpertUse(len(self.workers)), call.wanted.n, self.experts
        parts, done = list[tuple[Batch, int | None]](), dict[int, int]()
        for batch in call.batches:
            if batch.expert is None:
                parts.append((batch, None))
            else:
                use.add(1.0, torch.nn.functional.one_hot(batch.expert, len(names)))
                for k in batch.expert.unique().tolist():
                    parts.append((batch.part((batch.expert == k).nonzero()[:, 0]), k))

        async def made(place: int, part: Batch, k: int | None) -> tuple[Batch, Tensor]:
            def tell(step: int) -> None:
                done[place] = step
                if len(done) == len(parts) and step == min(done.values()):
                    on_step(step)

            return part, await self._samples(call.how, part, k, tell, use)

        found = await asyncio.gather(*(made(place, *part) for place, part in enumerate(parts)))
        shares = dict(zip(names, use.shares.tolist(), strict=True))
        for name, share in shares.items():
            self.images.labels(name).inc(share * num)
        files = [await self._in_thread(self._decode, *group) for group in gathered(found)]
        by = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share)
        steps, waiting = call.how.steps, self.active
        log.info("%s in %d steps by %s; %d in the queue", counted(num, "image"), steps, by, waiting)
        return sorted(one for part in files for one in part)

    async def _samples(
        self, how: Plan, batch: Batch, k: int | None, on_step: Report, use: ExpertUse
    ) -> Tensor:
        """Samples (n, C, H, W) of a batch: those of one expert are one message, others one per step."""
        if k is not None and how.model.experts[k].noise_range == WHOLE:
            given, negative = batch.conditions.given, batch.conditions.negative
            asked = how.model.conditions_by_expert(how.guidance(), negative, given)
            assert isinstance(how.noise, Seeded)
            settings = (how.grid_steps, how.model.shift, how.solver_name)
            job = SampleJob(how.noise.seed, tuple(batch.numbers), *settings, *asked[k])
            return _value((await self._ask(k, job, on_step))[0])
        is_left = False

        def step(index: int, x: Tensor) -> Tensor:
            on_step(index + 1)
            return x

        def integrated() -> Tensor:
            return run(how, batch, step, lambda: is_left, use if k is None else None)

        try:
            return cast(Tensor, await self._in_thread(integrated))
        finally:
            is_left = True

    def _decode(self, rows: Tensor, expert: int, samples: Tensor) -> list[tuple[int, bytes]]:
        """Numbers and PNG files of the images of these samples."""
        found = []
        decoded = (self.pipeline.decode(one, expert) for one in samples.split(self.limits.batch_size))
        images = (image for batch in decoded for image in to_bytes(batch))
        for row, image in zip(rows.tolist(), images, strict=True):
            save_png(image, file := io.BytesIO())
            found.append((row, file.getvalue()))
        return found

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    def _velocity(self, k: int, job: VelocityJob) -> Tensor:
        """The velocity of expert k, for a thread that waits."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(self._posted(k, job), self.loop).result()

    async def _posted(self, k: int, job: VelocityJob) -> Tensor:
        """The velocity of expert k; jobs that come while messages are under way are one message together."""
        done = asyncio.get_running_loop().create_future()
        self.outbox[k].append((job, done))
        if len(self.senders[k]) < MESSAGES:
            sender = asyncio.create_task(self._post(k))
            self.senders[k].add(sender)
            sender.add_done_callback(self.senders[k].discard)
        return _value(await done)

    async def _post(self, k: int) -> None:
        """Send what waits for expert k, message after message."""
        while posted := self.outbox[k]:
            self.outbox[k] = []
            try:
                found: list[Any] = await self._ask(k, [job for job, _ in posted])
            except Exception as error:
                found = [error] * len(posted)
            for (_, done), one in zip(posted, found, strict=True):
                if not done.done():
                    done.set_result(one)

    async def _ask(
        self, k: int, work: SampleJob | list[VelocityJob], on_step: Report = lambda step: None
    ) -> list[Any]:
        """What the worker of expert k answers: an `Answer` or an exception for each job.

        One that is lost is asked again, `TRIES` times.
        """
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        for _ in range(TRIES):
            task = asyncio.ensure_future(self._sent(k, work, on_step))
            try:
                while not (await asyncio.wait([task], timeout=WAIT))[0]:
                    if not await self._is_there(k) and time.monotonic() - self.missing[k] > RESTART:
                        raise Refusal(503, f"{self.experts[k]} has no worker; /healthz tells when it has one")
                found = task.result()
            except RayTaskError:
                raise
            except (RayError, RayServeException) as error:
                self.lost.labels(self.experts[k]).inc()
                log.warning(
                    "%s: its worker was lost (%s), and is asked again", self.experts[k], type(error).__name__
                )
                await asyncio.sleep(AGAIN)
            else:
                self.missing[k] = 0.0
                for one in found:
                    if isinstance(one, Answer) and one.batch:
                        self.batches.labels(self.experts[k]).observe(one.batch)
                return found
            finally:
                task.cancel()
        raise Refusal(503, f"the worker of {self.experts[k]} was lost {TRIES} times")

    async def _sent(self, k: int, work: SampleJob | list[VelocityJob], on_step: Report) -> list[Any]:
        if isinstance(work, SampleJob):
            return [await _last(self.workers[k].options(stream=True).draw.remote(work), on_step)]
        return list(await self.workers[k].velocity.remote(work))


def _value(found: Any) -> Tensor:
    """The tensor of an `Answer`, or the error in its place raised."""
    value = found.value if isinstance(found, Answer) else found
    if isinstance(value, Exception):
        raise value
    return cast(Tensor, value)


async def _last(answers: Any, on_step: Report) -> Answer:
    """The last of a worker's answers, which come after the steps."""
    try:
        async for answer in answers:
            if isinstance(answer, Answer):
                return answer
            on_step(answer)
    finally:
        answers.cancel()
    raise RuntimeError("a worker ended without an answer")


async def _body(request: Any) -> bytes:
    from ray.exceptions import TaskCancelledError
    from starlette.requests import ClientDisconnect

    body = b""
    try:
        async with asyncio.timeout(BODY):
            async for part in request.stream():
                body += part
                if len(body) > LARGEST_BODY:
                    raise Refusal(413, f"the body has more than {LARGEST_BODY} bytes")
    except TimeoutError as error:
        raise Refusal(408, f"the body took more than {BODY:g} s") from error
    except (ClientDisconnect, TaskCancelledError) as error:
        raise Refusal(400, "the client left before its body was whole") from error
    return body


def _datum(wanted: ImageRequest, row: int, image: bytes) -> dict[str, Any]:
    """An image as the API has it, with what makes it again."""
    return {"b64_json": b64encode(image).decode(), "seed": wanted.seed, "index": wanted.start + row}


def _event(kind: str, **values: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **values})}\n\n"
