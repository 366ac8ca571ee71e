"""Workers of a service: each holds one expert, and computes for requests of like settings together.

Under ``draw`` a job is a sample from noise to data: what comes is a seed, indices and embeddings, what goes
are latents. For other strategies a job is one call of the velocity, of a state that comes and a velocity that
goes. Jobs change each other by rounding only.
"""

import asyncio
import contextlib
import ctypes
import logging
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hddm.conditions import Conditions, Inputs
from hddm.ensemble import Ensemble
from hddm.experts.loading import open_ensemble
from hddm.networks.offload import bring
from hddm.noise import Latents, Seeded
from hddm.running import Batch, run
from hddm.sampling import plan
from hddm.serving.answers import Refusal
from hddm.utils.errors import HddmError, one_line
from hddm.utils.tensors import available_device
from hddm.velocity import Guidance, VelocityField

LULL = 0.005
"""Seconds that an idle worker waits for more jobs, so that those of one moment are one batch."""
Tensors = Mapping[str, Tensor]
log = logging.getLogger(__name__)


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
        """Key of the jobs that can be computed together."""
        settings = (self.steps, self.shift, self.solver, self.guidance)
        return settings, _shapes(self.negative), _shapes(self.conditions)

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True)
class VelocityJob:
    """Velocity of states x (n, C, H, W) at times t (n,); students of few steps need its end, ``then``."""

    x: Tensor
    t: Tensor
    guidance: Guidance
    negative: Tensors
    conditions: Tensors
    then: float | None = None

    @property
    def like(self) -> Hashable:
        """Key of the jobs that can be computed together."""
        return self.guidance, self.then, self.x.shape[1:], _shapes(self.negative), _shapes(self.conditions)

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Answer:
    """What a job asks for, or what is wrong with it: Ray would log the calls that led to an exception."""

    value: Tensor | HddmError
    batch: int
    """Number of samples in its batch, as the first job of it tells; 0 for the others."""


@dataclass(eq=False)
class _Waiting:
    """A job until it is done; ``on_step`` is told of its steps."""

    job: SampleJob | VelocityJob
    on_step: Callable[[int], None]
    done: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Worker:
    """One expert of an ensemble, as a deployment of Ray Serve.

    Args:
        folder: the ensemble, on every machine under the same path.
        index: of the expert.
        dtype: that its network runs in.
        device: of `hddm.utils.tensors.available_device`.
        threads: of torch, on a CPU.
        batch_size: samples computed together, at most.
        is_batched: compute jobs of several requests together; without it images are those of
            ``hddm sample`` to the bit.
    """

    def __init__(
        self,
        folder: str,
        index: int,
        dtype: torch.dtype,
        device: str,
        threads: int,
        batch_size: int,
        is_batched: bool,
    ) -> None:
        self._source = Path(folder), index, dtype, available_device(device)
        self.field: VelocityField | None = None
        self.batch_size, self.is_batched = batch_size, is_batched
        self._waiting: list[_Waiting] = []
        self._work: asyncio.Task[None] | None = None
        # One thread, so that batches follow each other; it has a number of threads of its own in torch.
        self._thread = ThreadPoolExecutor(1, "hddm-worker", torch.set_num_threads, (threads,))
        # Ray would start a worker that cannot again and again, while its requests wait.
        self._thread.submit(self._opened)

    async def ready(self) -> str:
        """Empty, once the weights are there; or why they cannot be read."""
        try:
            if self.field is None:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._opened)
        except Refusal as error:
            return one_line(error.__cause__, 400)
        return ""

    def _opened(self) -> VelocityField:
        """The expert; one that could not be read is tried again, since its files may have been mended."""
        if self.field is None:
            try:
                self.field = _read(*self._source)
            except Exception as error:
                log.warning("%s", one_line(error, 400))
                raise Refusal(503, f"expert {self._source[1]} cannot be read; the log says why") from error
        return self.field

    async def velocity(self, jobs: Sequence[VelocityJob]) -> list[Answer | BaseException]:
        """The velocities that the expert has there, or what went wrong with each."""
        waiting = (self._done(_Waiting(job, lambda step: None)) for job in jobs)
        return await asyncio.gather(*waiting, return_exceptions=True)

    async def draw(self, job: SampleJob) -> AsyncIterator[int | Answer]:
        """The samples, after the number of each step that is done."""
        loop, steps = asyncio.get_running_loop(), asyncio.Queue[int | None]()

        def tell(step: int) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, step)

        made = asyncio.ensure_future(self._done(_Waiting(job, tell)))
        made.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (step := await steps.get()) is not None:
                yield step
            yield made.result()
        finally:
            made.cancel()

    async def _done(self, one: _Waiting) -> Answer:
        self._waiting.append(one)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._work_off())
        try:
            return await one.done
        finally:
            # Cancelled or done: nobody waits for it.
            if one in self._waiting:
                self._waiting.remove(one)

    async def _work_off(self) -> None:
        """Compute what waits, batch after batch, the oldest job and its like first."""
        if self.is_batched:
            await asyncio.sleep(LULL)
        while self._waiting:
            oldest, rows = self._waiting[0], 0
            batch = []
            for one in list(self._waiting):
                alike = type(one.job) is type(oldest.job) and one.job.like == oldest.job.like
                if one is oldest or (self.is_batched and alike and rows + len(one.job) <= self.batch_size):
                    batch.append(one)
                    rows += len(one.job)
                    self._waiting.remove(one)
            await self._compute(batch)

    async def _compute(self, batch: Sequence[_Waiting]) -> None:
        run = asyncio.get_running_loop().run_in_executor
        try:
            values = await run(self._thread, self._run, batch)
        except Exception as error:
            # One of them may be to blame, and the others go on.
            for one in batch if len(batch) > 1 else ():
                await self._compute([one])
            if len(batch) == 1 and not batch[0].done.done():
                if isinstance(error, HddmError):
                    batch[0].done.set_result(Answer(error, 0))
                else:
                    batch[0].done.set_exception(error)
            return
        for one, value in zip(batch, values, strict=True):
            if not one.done.done():
                rows = sum(len(other.job) for other in batch) if one is batch[0] else 0
                one.done.set_result(Answer(value, rows))

    @torch.no_grad()
    def _run(self, batch: Sequence[_Waiting]) -> Sequence[Tensor]:
        jobs = [one.job for one in batch]
        first, expert = jobs[0], self._opened()
        negative, conditions = (
            _joined((getattr(job, name) for job in jobs), expert.device)
            for name in ("negative", "conditions")
        )
        if isinstance(first, VelocityJob):
            x = torch.cat([job.x for job in jobs if isinstance(job, VelocityJob)]).to(expert.device)
            t = torch.cat([job.t for job in jobs if isinstance(job, VelocityJob)])
            then = None if first.then is None else torch.tensor(first.then, dtype=torch.float64)
            values = expert.velocity(x, t, first.guidance, negative or None, then, **conditions)
        else:
            assert expert.sample_shape is not None
            drawn = [job for job in jobs if isinstance(job, SampleJob)]
            x = torch.cat([Seeded(job.seed).initial(job.indices, expert.sample_shape) for job in drawn])
            how = plan(
                expert,
                steps=first.steps,
                shift=first.shift,
                solver=first.solver,
                guidance=first.guidance,
                noise=Latents(x),
            )
            asked = Conditions(conditions, negative)

            def on_step(index: int, x: Tensor) -> Tensor:
                for one in batch:
                    one.on_step(index + 1)
                return x

            values = run(
                how,
                Batch.of(len(x), asked, torch.zeros(len(x), dtype=torch.long)),
                on_step,
                # Clients that left cost nothing more, once all of a batch have.
                stop=lambda: all(one.done.done() for one in batch),
            )
        parts: Sequence[Tensor] = values.cpu().split([len(job) for job in jobs])
        return parts


def _read(folder: Path, index: int, dtype: torch.dtype, device: torch.device) -> VelocityField:
    """The expert, with its weights; those of the others are not opened."""
    found = open_ensemble(folder, dtype).expert_set(device, dtype).fields()[index]
    for network in (found.network, found.weak and found.weak.network):
        bring(network)
    # glibc keeps tens of megabytes that reading has freed; other libraries have no such call.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return found


def _shapes(conditions: Tensors) -> Hashable:
    return tuple(sorted((name, value.shape[1:], value.dtype) for name, value in conditions.items()))


def _joined(conditions: Iterable[Tensors], device: torch.device) -> dict[str, Tensor]:
    rows = list(conditions)
    return {name: torch.cat([one[name] for one in rows]).to(device) for name in rows[0]}


class RemoteExpert(VelocityField):
    """An expert whose network is in another process; ``ask`` gives its velocity there."""

    def __init__(self, known: VelocityField, ask: Callable[[VelocityJob], Tensor]) -> None:
        vars(self).update(vars(known))
        self.network = _elsewhere
        self._ask = ask

    def guided(self, x_t: Tensor, times: Tensor, inputs: Inputs, then: Tensor | None = None) -> Tensor:
        end = None if then is None or self.sampling_steps is None else float(then)
        return self._ask(VelocityJob(x_t, times, inputs.guidance, inputs.negative, inputs.conditions, end))


def _elsewhere(*inputs: Any, **conditions: Any) -> Tensor:
    raise HddmError("this expert's network is in another process")


class RemoteEnsemble(Ensemble):
    """An ensemble of experts that are asked at the same time, by ``ask`` with their index and a job."""

    def __init__(self, known: Ensemble, ask: Callable[[int, VelocityJob], Tensor]) -> None:
        vars(self).update(vars(known))
        self.experts = [RemoteExpert(one, partial(ask, k)) for k, one in enumerate(known.experts)]
        self._threads = ThreadPoolExecutor(thread_name_prefix="hddm-ask", max_workers=64)

    def ask_each(self, experts: Sequence[int], ask: Callable[[int], Tensor]) -> Iterable[tuple[int, Tensor]]:
        return zip(experts, self._threads.map(ask, experts), strict=True)
