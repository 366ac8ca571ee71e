"""The front of a service: answers requests with what its workers compute.

It holds text encoders, router and VAEs. Under ``draw`` each image is one message to the worker of its expert
and one back; for other strategies the front integrates, and at each step states go to the workers of nonzero
weight. The work of a lost worker is repeated: a sample depends on seed and index alone.

The interface is OpenAI's ``POST /v1/images/generations``, so that its clients work unchanged; further keys
(seed, steps, strategy, …) are named as in ``hddm sample``. A request holds numbers and texts only: nothing in
it is opened, imported or run.
"""

import asyncio
import hashlib
import hmac
import io
import logging
import math
import secrets
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from pydantic import ConfigDict, Field
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from hddm.data.images import save_png, to_bytes
from hddm.expert_use import ExpertUse
from hddm.guidance import Interval
from hddm.networks.folders import sha256_once
from hddm.noise import Seeded
from hddm.pipelines.picture_texts import PictureTexts
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.running import Batch, NotFinite, Plan, gathered, run
from hddm.sampling import batches, plan
from hddm.serving.workers import Answer, Refusal, RemoteEnsemble, SampleJob, VelocityJob
from hddm.settings import Limits, SamplingMethod, ServeSettings, StrategyName
from hddm.utils.documents import parse_object
from hddm.utils.errors import HddmError, counted, one_line
from hddm.utils.records import WHOLE, Seed, model_hash, parse_record
from hddm.utils.streams import NUMBERS
from hddm.utils.tensors import dtype_on

LARGEST_BODY = 1 << 16
"""Bytes of a request's body at most."""
LONGEST_PROMPT = 4000
LARGEST_GUIDANCE = 1000
"""Guidance beyond this could overflow, and would look like damaged weights."""
AGAIN = 0.25
"""Seconds until the work of a lost worker is sent again."""
TRIES = 20
BODY = 10.0
"""Seconds until a body must be complete; until then a request occupies one of Ray Serve's calls."""
WAIT = 2.0
"""Seconds until a silent worker is checked, and also the time limit of its answer."""
RESTART = 60.0
"""Seconds that a lost worker has to come back before its requests are refused."""

Prompt = Annotated[str, Field(max_length=LONGEST_PROMPT)]
Piece = tuple[Batch, int | None]
"""A batch, and its expert if all its samples have the same one."""
Image = tuple[int, bytes]
"""Number of an image in its request, and its PNG file."""

FAILED = Refusal(500, "the service failed; its log says why")

log = logging.getLogger(__name__)


class ImageRequest(SamplingMethod):
    """Body of a request for images.

    Its image i is image ``start`` + i of ``hddm sample`` with the same settings.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    prompt: Prompt | None = None
    """A text, or the name of a class; None for any images."""
    model: str | None = None
    """The ensemble by default, or one of its experts; see ``GET /v1/models``."""
    n: Annotated[int, Field(ge=1)] = 1
    """Images to make."""
    size: Annotated[str, Field(pattern=r"^(auto|\d{1,5}x\d{1,5})$")] = "auto"
    response_format: Literal["b64_json"] = "b64_json"
    output_format: Literal["png"] = "png"
    user: str | None = None
    """Without effect."""
    seed: Seed = Field(default_factory=lambda: secrets.randbelow(NUMBERS))
    start: Seed = 0
    strategy: Annotated[StrategyName, Field(max_length=40)] | None = None
    guidance_scale: Annotated[float, Field(ge=-LARGEST_GUIDANCE, le=LARGEST_GUIDANCE)] = 1.0
    # A list of JSON is a pair, too.
    guidance_interval: Annotated[Interval, Field(strict=False)] = (0.0, 1.0)
    negative_prompt: Prompt | None = None


def read_request(body: bytes, limits: Limits) -> ImageRequest:
    """Parse a body; raises a `Refusal` with status 400 that names the key and the value."""
    try:
        request = parse_record(parse_object(body, "request"), ImageRequest, "request")
    except HddmError as error:
        raise Refusal(400, error.message) from error
    refuse_more("n", request.n, limits.max_images)
    refuse_more("steps", request.steps or 0, limits.max_steps)
    return request


def refuse_more(name: str, value: int, most: int) -> None:
    """Raise a `Refusal` with status 400 for a number above a limit."""
    if value > most:
        raise Refusal(
            400, f"{name} is {one_line(value, 30)}, and this service makes at most {most}", name
        )


class Front:
    """Answers requests, as the ingress deployment of Ray Serve.

    Args:
        folder: the ensemble.
        settings: bounds of requests, and the dtype of router, text encoders and VAEs.
        threads: number of torch's threads.
        token: SHA-256 of the bearer token in hexadecimal; None admits everybody.
        workers: handles of the experts' deployments by name, in the experts' order.
    """

    def __init__(
        self,
        folder: str,
        settings: ServeSettings,
        threads: int,
        token: str | None,
        workers: Mapping[str, Any],
    ) -> None:
        # Ray shows what a worker writes to its standard error.
        logging.basicConfig(format="%(message)s")
        logging.getLogger("hddm").setLevel(logging.INFO)
        torch.set_num_threads(threads)
        self.limits, self.token = settings, token
        self.experts, self.workers = list(workers), list(workers.values())
        self.name = Path(folder).name
        self.hash = model_hash(Path(folder), sha256_once)
        # Reads no weights of experts, since their networks never run here.
        dtype = dtype_on(torch.device("cpu"), settings.dtype)
        self.pipeline = HDDMPipeline.from_pretrained(folder, dtype=dtype)
        self.ensemble = RemoteEnsemble(self.pipeline.ensemble, self._velocity)
        self.threads = ThreadPoolExecutor(
            settings.max_queue + 1,
            "hddm-front",
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )
        self.active, self.created = 0, int(time.time())
        self.loop: asyncio.AbstractEventLoop | None = None
        self.patience = 1
        """Seconds that the latest request took, and after which one that was turned away may try again."""
        self.missing = [0.0 for _ in workers]
        """Since when a worker has not answered, in monotonic seconds; 0 if it does."""
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("hddm_requests", "Requests answered", ["status"], registry=registry)
        self.seconds = Histogram(
            "hddm_request_seconds", "Seconds of a request for images", registry=registry
        )
        self.queue = Gauge("hddm_queue", "Requests that wait or run", registry=registry)
        self.queue.set_function(lambda: self.active)
        by_expert: dict[str, Any] = {"labelnames": ["expert"], "registry": registry}
        made = "Images by the expert that made them, in parts by weight"
        self.images = Counter("hddm_expert_images", made, **by_expert)
        self.lost = Counter("hddm_worker_lost", "Calls whose worker was lost", **by_expert)
        for name in self.experts:
            for metric in (self.images, self.lost):
                metric.labels(name)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        self.loop = asyncio.get_running_loop()
        answers = {
            "GET /healthz": self._health,
            "GET /metrics": self._metrics,
            "GET /v1/models": self._models,
            "POST /v1/images/generations": self._generate,
        }
        line = f"{request.method} {request.url.path}".replace("HEAD", "GET", 1)
        try:
            if line != "GET /healthz":
                self._check_token(request)
            answer = answers.get(line)
            if answer is None:
                raise Refusal(404, f"{one_line(line, 100)}: there is {', '.join(answers)}")
            response = await answer(request)
        except Exception as error:
            refusal = self._refusal(error, one_line(line, 100))
            headers = {
                429: {"Retry-After": str(self.patience)},
                401: {"WWW-Authenticate": "Bearer"},
            }
            response = JSONResponse(refusal.body, refusal.status, headers.get(refusal.status))
        self.requests.labels(str(response.status_code)).inc()
        return response

    def _refusal(self, error: Exception, request: str = "POST /v1/images/generations") -> Refusal:
        """The answer to a client for an error; errors that its request did not cause are logged."""
        if isinstance(error, Refusal):
            return error
        # A request's guidance is bounded, so the weights cause samples that are not finite.
        if isinstance(error, HddmError) and not isinstance(error, NotFinite):
            return Refusal(400, error.message)
        log.error("%s failed", request, exc_info=error)
        return FAILED

    def _check_token(self, request: Request) -> None:
        if self.token is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        found = hashlib.sha256(given.strip().encode()).hexdigest()
        if kind.lower() != "bearer" or not hmac.compare_digest(found, self.token):
            raise Refusal(401, "send the service's token: Authorization: Bearer TOKEN")

    async def _health(self, request: Request) -> Response:
        there = await asyncio.gather(*map(self._is_there, range(len(self.workers))))
        missing = []
        for name, is_up in zip(self.experts, there, strict=True):
            if not is_up:
                missing.append(name)
        content = {"status": "waits for experts" if missing else "ok", "missing": missing}
        return JSONResponse(content, 503 if missing else 200)

    async def _is_there(self, k: int) -> bool:
        try:
            is_there = not await asyncio.wait_for(self.workers[k].ready.remote(), WAIT)
        except Exception:  # whatever the reason
            is_there = False
        self.missing[k] = 0.0 if is_there else self.missing[k] or time.monotonic()
        return is_there

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def _models(self, request: Request) -> Response:
        names = [self.name]
        names += [f"{self.name}/{expert}" for expert in self.experts]
        shared = {"object": "model", "created": self.created, "owned_by": "hddm"}
        data = [{"id": name, **shared} for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def _generate(self, request: Request) -> Response:
        wanted = read_request(await _body(request), self.limits)
        expert = self._check(wanted)
        if self.active >= self.limits.max_queue:
            raise Refusal(
                429, f"{self.active} requests wait or run; try again in {self.patience} s"
            )
        data = []
        for row, image in await self._made(wanted, expert):
            text = b64encode(image).decode()
            data.append({"b64_json": text, "seed": wanted.seed, "index": wanted.start + row})
        return JSONResponse({"created": int(time.time()), "data": data})

    def _check(self, wanted: ImageRequest) -> int | None:
        """Index of the requested expert, None for all; raises a `Refusal`."""
        height, width = self.pipeline.image_size
        size = f"{width}x{height}"
        if wanted.size not in ("auto", size):
            reason = f"size is {wanted.size!r}, and this ensemble makes {size}; or pass auto"
            raise Refusal(400, reason, "size")
        if wanted.model in (None, self.name):
            return None
        names = [f"{self.name}/{expert}" for expert in self.experts]
        if wanted.model not in names:
            reason = (
                f"there is no model {one_line(repr(wanted.model), 60)}; GET /v1/models lists them"
            )
            raise Refusal(404, reason, "model")
        return names.index(wanted.model)

    async def _made(self, wanted: ImageRequest, expert: int | None) -> list[Image]:
        """A request's images, in time."""
        self.active += 1
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.timeout) as limit:
                how, pieces = await self._in_thread(self._prepared, wanted, expert)
                images = await self._make(how, pieces, self._texts(wanted, expert, how))
            taken = time.monotonic() - begun
            self.seconds.observe(taken)
            self.patience = math.ceil(taken)
            return images
        except TimeoutError as error:
            if not limit.expired():
                raise
            seconds = self.limits.timeout
            raise Refusal(
                504, f"took more than {seconds:g} s; ask for fewer images or steps"
            ) from error
        finally:
            self.active -= 1

    def _prepared(self, wanted: ImageRequest, expert: int | None) -> tuple[Plan, list[Piece]]:
        """A request's plan and its pieces, with conditions encoded and experts chosen."""
        text, label = self._asked(wanted)
        labels = None if label is None else [label]
        conditions = self.pipeline.encode(
            text, labels, wanted.negative_prompt, wanted.guidance.by_condition
        )
        how = plan(self.ensemble, **wanted.arguments, expert=expert, noise=Seeded(wanted.seed))
        refuse_more("steps", how.steps, self.limits.max_steps)
        numbers = range(wanted.start, wanted.start + wanted.n)
        cycled = conditions.cycled(range(wanted.n))
        pieces: list[Piece] = []
        for batch in batches(how, numbers, cycled, self.limits.batch_size):
            if batch.expert is None:
                pieces.append((batch, None))
                continue
            for k in batch.expert.unique().tolist():
                rows = (batch.expert == k).nonzero()[:, 0]
                pieces.append((batch.part(rows), k))
        return how, pieces

    def _asked(self, wanted: ImageRequest) -> tuple[str | None, str | None]:
        """The text and the class that a request's prompt stands for, of which one is None at least."""
        prompt = wanted.prompt
        if prompt in self.pipeline.ensemble.classes:
            return None, prompt
        return prompt if prompt or self.pipeline.takes_prompts else None, None

    def _texts(self, wanted: ImageRequest, expert: int | None, how: Plan) -> PictureTexts:
        """What all pictures of a request have in common."""
        text, label = self._asked(wanted)
        is_one = expert is not None or self.ensemble.num_domains == 1
        return PictureTexts(
            model=self.name,
            model_sha256=self.hash,
            seed=wanted.seed,
            steps=how.grid_steps,
            solver=how.solver_name,
            strategy=None if is_one else wanted.strategy or self.pipeline.record.strategy,
            guidance=wanted.guidance,
            prompts=() if text is None else (text,),
            labels=() if label is None else (label,),
            negative_prompt=wanted.negative_prompt,
        )

    async def _make(self, how: Plan, pieces: Sequence[Piece], texts: PictureTexts) -> list[Image]:
        use = ExpertUse(len(self.workers))
        makers: dict[int, str] = {}

        async def made(batch: Batch, k: int | None) -> tuple[Batch, Tensor]:
            own = ExpertUse(len(self.workers))
            if batch.expert is not None:
                own.add(1.0, torch.nn.functional.one_hot(batch.expert, len(self.experts)))
                own.kept = batch.expert
            samples = await self._samples(how, batch, k, own)
            use.tally += own.tally
            if own.kept is not None and self.ensemble.num_domains > 1:
                for row, kept in zip(batch.rows.tolist(), own.kept.tolist(), strict=True):
                    # Of a pair by noise, the first stands for both.
                    first = self.ensemble.domains[kept]
                    makers[row] = self.pipeline.record.experts[first].label
            return batch, samples

        found = await asyncio.gather(*(made(*piece) for piece in pieces))
        images: list[Image] = []
        start = min(min(batch.numbers) for batch, _ in pieces)

        def text_of(row: int, image: Tensor) -> dict[str, str]:
            return texts.of(start + row, image.shape[1:], makers.get(row))

        for group in gathered(found):
            images += await self._in_thread(self._decode, *group, text_of)
        images.sort()
        shares = dict(zip(self.experts, use.shares.tolist(), strict=True))
        for name, share in shares.items():
            self.images.labels(name).inc(share * len(images))
        by = [f"{name} {share:.0%}" for name, share in shares.items() if share]
        count = counted(len(images), "image")
        log.info(
            "%s in %d steps by %s; %d in the queue", count, how.steps, ", ".join(by), self.active
        )
        return images

    async def _samples(self, how: Plan, batch: Batch, k: int | None, use: ExpertUse) -> Tensor:
        """Samples (n, C, H, W) of a batch: one message for one expert alone, else one per step and expert."""
        if k is not None and how.model.experts[k].noise_range == WHOLE:
            given, negative = batch.conditions.given, batch.conditions.negative
            shared = how.model.conditions_by_expert(how.guidance, negative, given)
            guidance, *conditions = shared[k]
            seed, shift = cast(Seeded, how.noise).seed, cast(float, how.shift)
            method = (how.grid_steps, shift, how.solver_name, guidance)
            job = SampleJob(seed, tuple(batch.numbers), *method, *conditions)
            return await self._ask(k, job)
        is_left = False

        def integrated() -> Tensor:
            return run(how, batch, stop=lambda: is_left, use=use if k is None else None)

        try:
            return cast(Tensor, await self._in_thread(integrated))
        finally:
            is_left = True

    def _decode(
        self, rows: Tensor, expert: int, samples: Tensor, text_of: Callable[[int, Tensor], Any]
    ) -> list[Image]:
        """Images of these samples, each with its texts; ``rows`` are their numbers in the request."""
        found = []
        size = self.limits.batch_size
        for numbers, part in zip(rows.split(size), samples.split(size), strict=True):
            images = to_bytes(self.pipeline.decode(part, expert))
            for row, image in zip(numbers.tolist(), images, strict=True):
                file = io.BytesIO()
                save_png(image, file, text_of(row, image))
                found.append((row, file.getvalue()))
        return found

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    def _velocity(self, k: int, job: VelocityJob) -> Tensor:
        """The velocity of expert k; the calling thread waits for it."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(self._ask(k, job), self.loop).result()

    async def _ask(self, k: int, job: SampleJob | VelocityJob) -> Tensor:
        """The result of expert k's worker; the job of a lost worker is sent again, `TRIES` times."""
        for _ in range(TRIES):
            task = asyncio.ensure_future(self._sent(k, job))
            try:
                while not (await asyncio.wait([task], timeout=WAIT))[0]:
                    if not await self._is_there(k) and time.monotonic() - self.missing[k] > RESTART:
                        raise Refusal(
                            503, f"{self.experts[k]} has no worker; /healthz tells when it has one"
                        )
                found = task.result()
            except RayTaskError:
                raise
            except (RayError, RayServeException) as error:
                self.lost.labels(self.experts[k]).inc()
                log.warning(
                    "%s lost its worker (%s); asks again", self.experts[k], type(error).__name__
                )
                await asyncio.sleep(AGAIN)
            else:
                self.missing[k] = 0.0
                if isinstance(found, HddmError):
                    raise found
                return found
            finally:
                task.cancel()
        raise Refusal(503, f"the worker of {self.experts[k]} was lost {TRIES} times")

    async def _sent(self, k: int, job: SampleJob | VelocityJob) -> Answer:
        answer = self.workers[k].answer.remote(job)
        try:
            return cast(Answer, await answer)
        except asyncio.CancelledError:
            answer.cancel()
            raise


async def _body(request: Request) -> bytes:
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
