"""The front of a service: answers requests with what its workers compute.

It holds text encoders, router and VAEs. Under ``draw`` each image is one message to the worker of its expert
and one back; for other strategies the front integrates, and at each step states go to the workers of nonzero
weight. The work of a lost worker is repeated: a sample depends on seed and index alone.

The interface is OpenAI's ``POST /v1/images/generations`` and ``POST /v1/images/edits``, so that its clients
work unchanged; further keys (seed, steps, strategy, …) are named as in ``hddm sample``.

Text encoders, VAEs and the router run on the device that the service's settings name. Decoding has a thread
of its own, which takes one request after the other while others are sampled; a picture that a request begins
with is encoded by the same VAE, and waits for it.
"""

import asyncio
import hashlib
import hmac
import io
import logging
import math
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from hddm.data.images import save_png, to_bytes
from hddm.editing import Picture
from hddm.expert_use import ExpertUse
from hddm.networks.sample_sizes import Size
from hddm.noise import Seeded
from hddm.pipelines.picture_texts import PictureTexts
from hddm.pipelines.pipeline import HDDMPipeline
from hddm.running import Batch, NotFinite, Plan, gathered, run
from hddm.sampling import batches
from hddm.serving.refusals import Refusal, refuse_more
from hddm.serving.requests import (
    ImageRequest,
    Uploads,
    begin_of,
    read_edit,
    read_request,
    refusal_of,
)
from hddm.serving.sizes import ServedSizes
from hddm.serving.workers import Answer, RemoteEnsemble, SampleJob, VelocityJob, on_cpu
from hddm.settings import ServeSettings
from hddm.utils.errors import HddmError, counted, one_line
from hddm.utils.files import sha256_once
from hddm.utils.records import WHOLE, model_hash
from hddm.utils.tensors import available_device, dtype_on

LARGEST_BODY = 1 << 16
"""Bytes of a body of JSON at most."""
AGAIN = 0.25
"""Seconds until the work of a lost worker is sent again."""
TRIES = 20
BODY = 10.0
"""Seconds until a body must be complete; until then a request occupies one of Ray Serve's calls."""
UPLOAD = 60.0
"""The same of a form with pictures, which has its place in the queue meanwhile."""
WAIT = 2.0
"""Seconds until a silent worker is checked, and also the time limit of its answer."""
RESTART = 60.0
"""Seconds that a lost worker has to come back before its requests are refused."""

Piece = tuple[Batch, int | None]
"""A batch, and its expert if all its samples have the same one."""
Image = tuple[int, bytes]
"""Number of an image in its request, and its PNG file."""

GENERATIONS, EDITS = "POST /v1/images/generations", "POST /v1/images/edits"
FAILED = Refusal(500, "the service failed; its log says why")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageOrder:
    """A request that was found to be in order: images of one expert or all, of a size or their own."""

    wanted: ImageRequest
    expert: int | None
    size: Size | None
    uploads: Uploads | None = None


class Front:
    """Answers requests, as the ingress deployment of Ray Serve.

    Args:
        folder: the ensemble.
        settings: bounds of requests, and where router, text encoders and VAEs run.
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
        device = available_device(settings.device)
        # Reads no weights of experts, since their networks never run here.
        known = HDDMPipeline.from_pretrained(
            folder,
            dtype=dtype_on(device, settings.dtype),
            allow_program=settings.allow_program,
        )
        known.to(device)
        self.ensemble = RemoteEnsemble(known.ensemble, self._velocity)
        self.pipeline = known.with_ensemble(self.ensemble)
        self.sizes = ServedSizes.of(self.pipeline, settings.max_pixels)
        self.threads = ThreadPoolExecutor(
            settings.max_queue + 1,
            "hddm-front",
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )
        # Apart, so that samples of other requests do not wait for a free thread, nor it for them.
        self.decoder = ThreadPoolExecutor(1, "hddm-decode", torch.set_num_threads, (threads,))
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
            GENERATIONS: self._generate,
            EDITS: self._edit,
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

    def _refusal(self, error: Exception, request: str) -> Refusal:
        """The answer to a client for an error; errors that its request did not cause are logged."""
        if isinstance(error, Refusal):
            return error
        # A request's guidance is bounded, so the weights cause samples that are not finite.
        if isinstance(error, HddmError) and not isinstance(error, NotFinite):
            return refusal_of(error)
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
        data = [{"id": name, **shared, "sizes": self.sizes.described} for name in names]
        return JSONResponse({"object": "list", "data": data})

    async def _generate(self, request: Request) -> Response:
        wanted = read_request(await _body(request, LARGEST_BODY, BODY), self.limits)
        expert, size = self._expert(wanted), self.sizes.read(wanted.size)
        with self._place():
            return await self._answered(ImageOrder(wanted, expert, size))

    async def _edit(self, request: Request) -> Response:
        # Its pictures take memory, so a place in the queue comes first.
        with self._place():
            body = await _body(request, self.limits.max_upload, UPLOAD)
            wanted, uploads = await self._in_thread(read_edit, request.headers, body, self.limits)
            expert, size = self._expert(wanted), self.sizes.read(wanted.size)
            return await self._answered(ImageOrder(wanted, expert, size, uploads))

    @contextmanager
    def _place(self) -> Iterator[None]:
        """A place in the queue; a `Refusal` with status 429 if it is full."""
        if self.active >= self.limits.max_queue:
            raise Refusal(
                429, f"{self.active} requests wait or run; try again in {self.patience} s"
            )
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def _answered(self, order: ImageOrder) -> Response:
        wanted, data = order.wanted, []
        for row, image in await self._made(order):
            text = b64encode(image).decode()
            data.append({"b64_json": text, "seed": wanted.seed, "index": wanted.start + row})
        return JSONResponse({"created": int(time.time()), "data": data})

    def _expert(self, wanted: ImageRequest) -> int | None:
        """Index of the requested expert, None for all; raises a `Refusal`."""
        if wanted.model in (None, self.name):
            return None
        names = [f"{self.name}/{expert}" for expert in self.experts]
        if wanted.model not in names:
            reason = (
                f"there is no model {one_line(repr(wanted.model), 60)}; GET /v1/models lists them"
            )
            raise Refusal(404, reason, "model")
        return names.index(wanted.model)

    async def _made(self, order: ImageOrder) -> list[Image]:
        """A request's images, in time."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(self.limits.timeout) as limit:
                how, pieces = await self._in_thread(self._prepared, order)
                images = await self._make(how, pieces, self._texts(order, how))
        except TimeoutError as error:
            if not limit.expired():
                raise
            seconds = self.limits.timeout
            raise Refusal(
                504, f"took more than {seconds:g} s; ask for fewer images or steps"
            ) from error
        taken = time.monotonic() - begun
        self.seconds.observe(taken)
        self.patience = math.ceil(taken)
        return images

    def _prepared(self, order: ImageOrder) -> tuple[Plan, list[Piece]]:
        """A request's plan and its pieces, with conditions encoded and experts chosen."""
        wanted, expert = order.wanted, order.expert
        text, label = self._asked(wanted)
        labels = None if label is None else [label]
        conditions = self.pipeline.encode(
            text, labels, wanted.negative_prompt, wanted.guidance.by_condition
        )
        begin = begin_of(wanted, order.uploads)
        noise = Seeded(wanted.seed)
        how = self._sized(order).plan(begin, **wanted.arguments, expert=expert, noise=noise)
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

    def _sized(self, order: ImageOrder) -> HDDMPipeline:
        """The pipeline for pictures of a request's size; a `Refusal` for one that the experts do not make."""
        if order.size is None:
            return self.pipeline
        try:
            return self.pipeline.at_size(*order.size)
        except HddmError as error:
            raise Refusal(400, refusal_of(error).message, "size") from error

    def _asked(self, wanted: ImageRequest) -> tuple[str | None, str | None]:
        """The text and the class that a request's prompt stands for, of which one is None at least."""
        prompt = wanted.prompt
        if prompt in self.pipeline.ensemble.classes:
            return None, prompt
        return prompt if prompt or self.pipeline.takes_prompts else None, None

    def _texts(self, order: ImageOrder, how: Plan) -> PictureTexts:
        """What all pictures of a request have in common."""
        wanted = order.wanted
        text, label = self._asked(wanted)
        is_one = order.expert is not None or self.ensemble.num_domains == 1
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

        loop = asyncio.get_running_loop()
        for group in gathered(found):
            images += await loop.run_in_executor(self.decoder, self._decode, how, *group, text_of)
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
        picture = how.picture(batch.kind)
        # An edit of a picture by two prompts asks several experts.
        is_edit = picture is not None and picture.source is not None
        if k is not None and how.model.experts[k].noise_range == WHOLE and not is_edit:
            return await self._ask(k, _job_of(how, batch, k, picture))
        is_left = False

        def integrated() -> Tensor:
            return run(how, batch, stop=lambda: is_left, use=use if k is None else None)

        try:
            return cast(Tensor, await self._in_thread(integrated))
        finally:
            is_left = True

    def _decode(
        self,
        how: Plan,
        rows: Tensor,
        expert: int,
        samples: Tensor,
        text_of: Callable[[int, Tensor], Any],
    ) -> list[Image]:
        """Images of these samples, each with its texts; ``rows`` are their numbers in the request."""
        found = []
        size, picture = self.limits.batch_size, how.picture(expert)
        for numbers, part in zip(rows.split(size), samples.split(size), strict=True):
            own = None if picture is None else picture.rows(numbers)
            images = to_bytes(self.pipeline.decode(part, expert, own)).cpu()
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


def _job_of(how: Plan, batch: Batch, k: int, picture: Picture | None) -> SampleJob:
    """The samples of a batch, which expert k makes alone."""
    given, negative = batch.conditions.given, batch.conditions.negative
    guidance, against, conditions = how.model.conditions_by_expert(how.guidance, negative, given)[k]
    if picture is not None:
        # Pixels that stay are set here, after decoding.
        picture = replace(picture.rows(batch.rows), pixels=None, pixel_mask=None)
    return SampleJob(
        seed=cast(Seeded, how.noise).seed,
        indices=tuple(batch.numbers),
        steps=how.grid_steps,
        shift=cast(float, how.shift),
        solver=how.solver_name,
        guidance=guidance,
        negative=on_cpu(against),
        conditions=on_cpu(conditions),
        shape=how.shape_of(k),
        picture=picture,
    )


async def _body(request: Request, most: int, seconds: float) -> bytes:
    """The body of a request, of at most ``most`` bytes."""
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise Refusal(413, f"the body has more than {most} bytes")
    except TimeoutError as error:
        raise Refusal(408, f"the body took more than {seconds:g} s") from error
    except (ClientDisconnect, TaskCancelledError) as error:
        raise Refusal(400, "the client left before its body was whole") from error
    return bytes(body)
