"""Workers of a service: each holds one expert, and computes requests with equal settings together.

Under ``draw`` a job is samples from noise to data: seed, indices and embeddings come in, latents go out. For
other strategies a job is one call of the velocity: states come in, velocities go out. Jobs that are computed
together change each other by rounding only.
"""

import asyncio
import contextlib
import ctypes
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.conditions import Conditions, Inputs
from hddm.ensemble import Asked, Ensemble
from hddm.experts.loading import open_ensemble
from hddm.guidance import Guidance
from hddm.networks.offload import StoredNetwork
from hddm.noise import Latents, Seeded
from hddm.running import Batch, run
from hddm.sampling import plan
from hddm.settings import ServeSettings
from hddm.utils.errors import HddmError, one_line
from hddm.utils.tensors import available_device, dtype_on
from hddm.velocity import VelocityField

LULL = 0.005
"""Seconds that an idle worker waits for more jobs, so that simultaneous jobs become one batch."""
Tensors = Mapping[str, Tensor]
Answer = Tensor | HddmError
"""A job's result or its error, which Ray would log with a traceback if it were raised."""
log = logging.getLogger(__name__)


class Refusal(HddmError):
    """An error that a client gets: its HTTP status, and the parameter that caused it."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param

    def __reduce__(self) -> Any:
        return type(self), (self.status, self.message, self.param)

    @property
    def body(self) -> dict[str, Any]:
        """The error as clients of the API read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.status,
            }
        }


@dataclass(frozen=True)
class SampleJob:
    """Samples (n, C, H, W) of these indices under ``seed``, by one expert alone."""

    seed: int
    indices: tuple[int, ...]
    steps: int
    shift: float
    solver: str
    guidance: Guidance
    negative: Tensors
    conditions: Tensors

    @property
    def like(self) -> Hashable:
        """Equal for jobs that can be computed together."""
        how = (self.steps, self.shift, self.solver, self.guidance)
        return SampleJob, how, _shapes(self.negative), _shapes(self.conditions)

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class VelocityJob:
    """Velocity of states x (n, C, H, W) at times t (n,); ``then`` is the step's end, for students."""

    x: Tensor
    t: Tensor
    guidance: Guidance
    negative: Tensors
    conditions: Tensors
    then: float | None = None

    @property
    def like(self) -> Hashable:
        """Equal for jobs that can be computed together."""
        return (
            self.guidance,
            self.then,
            self.x.shape[1:],
            _shapes(self.negative),
            _shapes(self.conditions),
        )

    def __len__(self) -> int:
        return len(self.x)


@dataclass(eq=False)
class _Waiting:
    """A job until it is done."""

    job: SampleJob | VelocityJob
    done: asyncio.Future[Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Worker:
    """One expert of an ensemble, as a deployment of Ray Serve.

    Args:
        folder: the ensemble, under the same path on every machine.
        index: number of the expert.
        settings: where its network runs, and how many samples are computed together. Without ``batching``,
            images are those of ``hddm sample`` bit for bit.
        threads: number of torch's threads on a CPU.
    """

    def __init__(self, folder: str, index: int, settings: ServeSettings, threads: int) -> None:
        self._source = Path(folder), index, settings
        self.field: VelocityField | None = None
        self.batch_size, self.is_batched = settings.batch_size, settings.batching
        self._waiting: list[_Waiting] = []
        self._work: asyncio.Task[None] | None = None
        # One thread, so that batches follow each other; torch's number of threads is set per thread.
        self._thread = ThreadPoolExecutor(1, "hddm-worker", torch.set_num_threads, (threads,))
        # In __init__, an error would make Ray restart the worker forever while its requests wait.
        self._thread.submit(self._opened)

    async def ready(self) -> str:
        """Empty once the weights are there, else the reason why they cannot be read."""
        try:
            if self.field is None:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._opened)
        except Refusal as error:
            return one_line(error.__cause__, 400)
        return ""

    def _opened(self) -> VelocityField:
        """The expert; after an error it is read again, since its files may have been repaired."""
        if self.field is None:
            try:
                self.field = _read(*self._source)
            except Exception as error:
                log.warning("%s", one_line(error, 400))
                raise Refusal(
                    503, f"expert {self._source[1]} cannot be read; the log says why"
                ) from error
        return self.field

    async def answer(self, job: SampleJob | VelocityJob) -> Answer:
        """The samples, or the velocity, of a job."""
        one = _Waiting(job)
        self._waiting.append(one)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._work_off())
        try:
            return await one.done
        finally:
            # Nobody waits for it any more: it is cancelled or done.
            if one in self._waiting:
                self._waiting.remove(one)

    async def _work_off(self) -> None:
        """Compute all waiting jobs, batch after batch, beginning with the oldest job and those like it."""
        if self.is_batched:
            await asyncio.sleep(LULL)
        while self._waiting:
            oldest, rows = self._waiting[0], 0
            batch = []
            for one in list(self._waiting):
                fits = one.job.like == oldest.job.like and rows + len(one.job) <= self.batch_size
                if one is oldest or (self.is_batched and fits):
                    batch.append(one)
                    rows += len(one.job)
                    self._waiting.remove(one)
            await self._compute(batch)

    async def _compute(self, batch: Sequence[_Waiting]) -> None:
        values: Sequence[Tensor | Exception]
        try:
            loop = asyncio.get_running_loop()
            values = await loop.run_in_executor(self._thread, self._run, batch)
        except Exception as error:
            if len(batch) > 1:
                # One job may be the cause, so each is computed alone.
                for one in batch:
                    await self._compute([one])
                return
            values = [error]
        for one, value in zip(batch, values, strict=True):
            if one.done.done():
                continue
            if isinstance(value, Answer):
                one.done.set_result(value)
            else:
                one.done.set_exception(value)

    @torch.no_grad()
    def _run(self, batch: Sequence[_Waiting]) -> Sequence[Tensor]:
        jobs = [one.job for one in batch]
        first, expert = jobs[0], self._opened()
        negative = _joined([job.negative for job in jobs], expert.device)
        conditions = _joined([job.conditions for job in jobs], expert.device)
        if isinstance(first, VelocityJob):
            asked = [job for job in jobs if isinstance(job, VelocityJob)]
            x = torch.cat([job.x for job in asked])
            t = torch.cat([job.t for job in asked])
            then = None if first.then is None else torch.tensor(first.then, dtype=torch.float64)
            x = x.to(expert.device)
            values = expert.velocity(x, t, first.guidance, negative or None, then, **conditions)
        else:
            assert expert.sample_shape is not None
            shape = expert.sample_shape
            drawn = [job for job in jobs if isinstance(job, SampleJob)]
            x = torch.cat([Seeded(job.seed).initial(job.indices, shape) for job in drawn])
            how = plan(
                expert,
                steps=first.steps,
                shift=first.shift,
                solver=first.solver,
                guidance=first.guidance,
                noise=Latents(x=x),
            )
            own = Batch.of(
                len(x), Conditions(conditions, negative), torch.zeros(len(x), dtype=torch.long)
            )
            # When all clients of a batch have left, it ends.
            values = run(how, own, stop=lambda: all(one.done.done() for one in batch))
        parts: Sequence[Tensor] = values.cpu().split([len(job) for job in jobs])
        return parts


def _read(folder: Path, index: int, settings: ServeSettings) -> VelocityField:
    """The expert, with its weights; weights of the others are not read."""
    device = available_device(settings.device)
    dtype = dtype_on(device, settings.dtype)
    # Alone in its process, an adapter has nobody to share its base with, and is merged.
    experts = open_ensemble(folder, dtype).expert_set(device, dtype, shares=False)
    experts.prepare(settings)
    found = experts.fields()[index]
    for network in (found.network, found.weak and found.weak.network):
        if isinstance(network, StoredNetwork):
            network.shelf.bring(network)
    # glibc keeps tens of megabytes that reading has freed; other libraries have no such call.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return found


def _shapes(conditions: Tensors) -> Hashable:
    """Names of conditions, with the shape of a row and the dtype; equal for rows that can be joined."""
    shapes = [(name, value.shape[1:], value.dtype) for name, value in conditions.items()]
    return tuple(sorted(shapes))


def _joined(conditions: Sequence[Tensors], device: torch.device) -> dict[str, Tensor]:
    """The rows of several jobs' conditions, one job after the other."""
    found = {}
    for name in conditions[0]:
        rows = torch.cat([one[name] for one in conditions])
        found[name] = rows.to(device)
    return found


class RemoteExpert(VelocityField):
    """An expert whose network is in another process; ``request`` returns its velocity."""

    def __init__(self, known: VelocityField, request: Callable[[VelocityJob], Tensor]) -> None:
        vars(self).update(vars(known))
        self.network = None  # type: ignore[assignment]
        self._request = request

    def guided(
        self, x_t: Tensor, times: Tensor, inputs: Inputs, then: Tensor | None = None
    ) -> Tensor:
        end = None if then is None or self.sampling_steps is None else float(then)
        job = VelocityJob(x_t, times, inputs.guidance, inputs.negative, inputs.conditions, end)
        return self._request(job)


class RemoteEnsemble(Ensemble):
    """An ensemble of experts in other processes, which run at the same time.

    ``request`` returns the velocity of an expert, by its index and a job.
    """

    def __init__(self, known: Ensemble, request: Callable[[int, VelocityJob], Tensor]) -> None:
        vars(self).update(vars(known))
        self.experts = []
        for k, one in enumerate(known.experts):
            self.experts.append(RemoteExpert(one, partial(request, k)))
        self._threads = ThreadPoolExecutor(thread_name_prefix="hddm-expert", max_workers=64)

    def guided_by(
        self, rows: Mapping[int, int], batch: int, asked_of: Callable[[int], Asked]
    ) -> dict[int, Tensor]:
        def guided(k: int) -> Tensor:
            return self.experts[k].guided(*asked_of(k))

        return dict(zip(rows, self._threads.map(guided, rows), strict=True))
