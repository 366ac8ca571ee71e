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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hddm.conditions import Conditions, Inputs
from hddm.editing import Picture
from hddm.ensemble import Asked, Ensemble
from hddm.experts.loading import open_ensemble
from hddm.guidance import Guidance
from hddm.networks.offload import StoredNetwork
from hddm.networks.programs.permission import programs_allowed
from hddm.networks.sample_sizes import Size
from hddm.noise import OfSeveralSeeds
from hddm.running import Batch, run
from hddm.sampling import plan
from hddm.serving.refusals import Refusal
from hddm.settings import ServeSettings
from hddm.utils.errors import HddmError, one_line
from hddm.utils.memory import Fitting
from hddm.utils.tensors import available_device, dtype_on
from hddm.velocity import VelocityField

LULL = 0.005
"""Seconds that an idle worker waits for more jobs, so that simultaneous jobs become one batch."""
Tensors = Mapping[str, Tensor]
Answer = Tensor | HddmError
"""A job's result or its error, which Ray would log with a traceback if it were raised."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleJob:
    """Samples (n, C, H, W) of these indices under ``seed``, by one expert alone.

    They begin with a ``picture``, or noise. Tensors of jobs are on the CPU.
    """

    seed: int
    indices: tuple[int, ...]
    steps: int
    shift: float
    solver: str
    guidance: Guidance
    negative: Tensors
    conditions: Tensors
    shape: tuple[int, ...]
    """(C, H, W) of a sample."""
    picture: Picture | None = None
    """For all samples or one for each, in the expert's units."""

    @property
    def like(self) -> Hashable:
        """Equal for jobs that can be computed together."""
        how = (self.steps, self.shift, self.solver, self.guidance, self.shape)
        begin = None
        if self.picture is not None:
            has_mask = self.picture.mask is not None
            begin = (self.picture.strength, has_mask, self.picture.resampling)
        return SampleJob, how, begin, _shapes(self.negative), _shapes(self.conditions)

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
            self.shape,
            _shapes(self.negative),
            _shapes(self.conditions),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, H, W) of a sample."""
        return tuple(self.x.shape[1:])

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
        self._fittings: dict[tuple[int, ...], Fitting] = {}
        """By the shape of a sample: how many fit the memory."""
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
        sizes = [len(job) for job in jobs]
        shape, expert = jobs[0].shape, self._opened()
        expert = expert.at_size((shape[1], shape[2]))
        negative = _joined([job.negative for job in jobs])
        conditions = _joined([job.conditions for job in jobs])
        joined = Conditions(conditions, negative).map(lambda value: value.to(expert.device))
        if isinstance(jobs[0], VelocityJob):
            velocities = [job for job in jobs if isinstance(job, VelocityJob)]
            make = _velocities(expert, velocities, joined)
        else:
            drawn = [job for job in jobs if isinstance(job, SampleJob)]
            # When all clients of a batch have left, it ends.
            make = _samples(expert, drawn, joined, lambda: all(one.done.done() for one in batch))
        fitting = self._fittings.setdefault(shape, Fitting("images"))
        values = torch.cat(fitting.run(sum(sizes), make))
        parts: Sequence[Tensor] = values.split(sizes)
        return parts


Make = Callable[[int, int], Tensor]
"""Makes the rows from a first one to an end, on the CPU."""


def _velocities(expert: VelocityField, jobs: Sequence[VelocityJob], conditions: Conditions) -> Make:
    """Velocities of the jobs' states, one job after the other."""
    first = jobs[0]
    x = torch.cat([job.x for job in jobs])
    t = torch.cat([job.t for job in jobs])
    then = None if first.then is None else torch.tensor(first.then, dtype=torch.float64)

    def make(start: int, end: int) -> Tensor:
        own = conditions.map(lambda value: value[start:end])
        states = x[start:end].to(expert.device)
        return expert.velocity(
            states, t[start:end], first.guidance, own.negative or None, then, **own.given
        ).cpu()

    return make


def _samples(
    expert: VelocityField,
    jobs: Sequence[SampleJob],
    conditions: Conditions,
    stop: Callable[[], bool],
) -> Make:
    """Samples of the jobs, one job after the other."""
    first, pairs = jobs[0], list[tuple[int, int]]()
    for job in jobs:
        pairs += [(job.seed, index) for index in job.indices]
    picture = _joined_pictures(jobs)
    how = plan(
        expert,
        steps=first.steps,
        shift=first.shift,
        solver=first.solver,
        guidance=first.guidance,
        noise=OfSeveralSeeds(pairs=pairs),
        picture=lambda k: picture,
    )
    batch = Batch.of(len(pairs), conditions, torch.zeros(len(pairs), dtype=torch.long))

    def make(start: int, end: int) -> Tensor:
        return run(how, batch.part(torch.arange(start, end)), stop=stop).cpu()

    return make


def _joined_pictures(jobs: Sequence[SampleJob]) -> Picture | None:
    """The pictures of all samples; None where they begin as noise."""
    if jobs[0].picture is None:
        return None
    pictures, masks = [], []
    for job in jobs:
        assert job.picture is not None
        x_0, mask = job.picture.x_0, job.picture.mask
        pictures.append(x_0.expand(len(job), *x_0.shape[1:]))
        if mask is not None:
            masks.append(mask.expand(len(job), *mask.shape[1:]))
    return replace(
        jobs[0].picture, x_0=torch.cat(pictures), mask=torch.cat(masks) if masks else None
    )


def _read(folder: Path, index: int, settings: ServeSettings) -> VelocityField:
    """The expert, with its weights; weights of the others are not read."""
    device = available_device(settings.device)
    dtype = dtype_on(device, settings.dtype)
    # Alone in its process, an adapter has nobody to share its base with, and is merged.
    with programs_allowed(settings.allow_program):
        opened = open_ensemble(folder, dtype)
    experts = opened.expert_set(device, dtype, shares=False)
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


def _joined(conditions: Sequence[Tensors]) -> dict[str, Tensor]:
    """The rows of several jobs' conditions, one job after the other."""
    found = {}
    for name in conditions[0]:
        found[name] = torch.cat([one[name] for one in conditions])
    return found


def on_cpu(tensors: Tensors) -> dict[str, Tensor]:
    """The same tensors on the CPU, where those of jobs are."""
    return {name: value.cpu() for name, value in tensors.items()}


class RemoteExpert(VelocityField):
    """An expert whose network is in another process; ``request`` returns its velocity.

    Its states are on the device, and in the dtype, that ``known`` would run in.
    """

    def __init__(self, known: VelocityField, request: Callable[[VelocityJob], Tensor]) -> None:
        vars(self).update(vars(known))
        self._device, self._dtype = known.device, known.dtype
        self.network = None  # type: ignore[assignment]
        self._request = request

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def guided(
        self, x_t: Tensor, times: Tensor, inputs: Inputs, then: Tensor | None = None
    ) -> Tensor:
        end = None if then is None or self.sampling_steps is None else float(then)
        given = on_cpu(inputs.negative), on_cpu(inputs.conditions)
        job = VelocityJob(x_t.cpu(), times.cpu(), inputs.guidance, *given, end)
        return self._request(job).to(x_t.device)


class RemoteEnsemble(Ensemble):
    """An ensemble of experts in other processes, which run at the same time.

    ``request`` returns the velocity of an expert, by its index and a job; ``threads`` wait for it.
    """

    def __init__(
        self,
        known: Ensemble,
        request: Callable[[int, VelocityJob], Tensor],
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        vars(self).update(vars(known))
        self.experts = []
        for k, one in enumerate(known.experts):
            self.experts.append(RemoteExpert(one, partial(request, k)))
        self._request = request
        self._threads = threads or ThreadPoolExecutor(64, "hddm-expert")

    def at_sizes(self, sizes: Sequence[Size], pixels: Sequence[int]) -> Ensemble:
        found = super().at_sizes(sizes, pixels)
        return found if found is self else RemoteEnsemble(found, self._request, self._threads)

    def guided_by(
        self, rows: Mapping[int, int], batch: int, asked_of: Callable[[int], Asked]
    ) -> dict[int, Tensor]:
        def guided(k: int) -> Tensor:
            return self.experts[k].guided(*asked_of(k))

        return dict(zip(rows, self._threads.map(guided, rows), strict=True))
