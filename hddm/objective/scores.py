"""``hddm evaluate MODEL --held-out SHARD``: a model's errors by noise level and its likelihood."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hddm.classes import class_indices
from hddm.condition_names import LABELS, TEXT
from hddm.data.images import to_unit_range
from hddm.data.shard_records import holds_shard
from hddm.data.shards import TokenStore, open_shard
from hddm.ensemble import Ensemble
from hddm.evaluation.images import read_data
from hddm.evaluation.results import versions_of, write_result
from hddm.experts.loading import load
from hddm.experts.shard_images import evenly_spaced
from hddm.objective.checks import why_unscored
from hddm.objective.errors import TIMES, velocity_errors
from hddm.objective.flows import flows_of
from hddm.objective.likelihood import LikelihoodSettings, bits_per_dimension, log_likelihood
from hddm.objective.records import (
    BitsScore,
    HeldOutData,
    HeldOutScores,
    LevelScore,
    StrategyScores,
)
from hddm.sampling import plan
from hddm.settings import ObjectiveSettings, keywords
from hddm.utils.errors import HddmError, UsageError, errors_as
from hddm.utils.files import check_result_file
from hddm.utils.progress import Progress
from hddm.utils.records import model_hash
from hddm.utils.tensors import available_device

_PACKAGES = ("hddm-diffusion", "torch", "numpy")
_LIKELIHOOD_UNITS = 20
"""Progress that an image's likelihood counts for, in errors at one noise level."""


@dataclass(frozen=True)
class HeldOutImages:
    """Held-out samples, in the units of models, and what is known of each."""

    path: Path
    hash: str
    samples: Tensor
    classes: tuple[str, ...]
    labels: Tensor | None
    texts: TokenStore | None
    are_pixels: bool

    @classmethod
    def read(cls, path: Path) -> "HeldOutImages":
        """Samples of a shard, of a partition's held-out images, or of a folder of images.

        Raises `HddmError` as `hddm.data.shards.open_shard` and `hddm.evaluation.images.read_data`.
        """
        if holds_shard(path):
            shard = open_shard(path)
            return cls(
                path,
                shard.hash,
                shard.images,
                shard.classes,
                shard.labels,
                shard.texts,
                shard.space == "pixels",
            )
        group = read_data({"held_out": path})["held_out"]
        images = group.images
        pixels = to_unit_range(images.pixels)
        return cls(path, group.record.hash, pixels, images.classes, images.labels, None, True)

    def check(self, model: Ensemble) -> None:
        """Raise an `HddmError` for samples of another shape than the model's."""
        shape = tuple(self.samples.shape[1:])
        for one in model.experts:
            if one.sample_shape not in (None, shape):
                raise HddmError(
                    f"{self.path}: its samples are {shape}, the model's {one.sample_shape}; hddm encode "
                    "brings images to a model's size and latents"
                )

    def conditions(self, model: Ensemble) -> dict[str, Tensor]:
        """Conditions (N, …) that the model takes and these samples have, on its device."""
        found = {}
        takes = model.conditions if model.conditions is not None else ()
        if LABELS in takes and self.labels is not None:
            names = [self.classes[label] for label in self.labels.tolist()]
            found[LABELS] = class_indices(names, model.classes).to(model.device)
        if TEXT in takes and self.texts is not None:
            found[TEXT] = self.texts.take(torch.arange(len(self.samples))).to(model.device)
        return found


@keywords
def score_held_out(
    model: Path,
    held_out: Path,
    settings: ObjectiveSettings,
    *,
    out: Path | None = None,
    overwrite: bool = False,
) -> HeldOutScores:
    """Errors by noise level, and bits per dimension, of a model on held-out images.

    They are the training objective and the likelihood of its samples (`hddm.objective.errors`,
    `hddm.objective.likelihood`), under one strategy or several. All models see equal noise: image i depends
    on (seed, i) alone.

    Args:
        model: an expert, or an ensemble.
        held_out: a shard, a partition with held-out images, or a folder of images.
        settings: its fields are keywords: see `hddm.settings.ObjectiveSettings`.
        out: JSON file for the result.
        overwrite: replace a result in ``out``.

    Raises:
        HddmError: for models and images that cannot be read or do not fit, strategies that define neither a
            velocity nor a density, and experts that cover a part of the noise only.
    """
    if out is not None:
        check_result_file(out, overwrite)
    device = available_device(settings.device)
    loaded = load(model, device=device)
    data = HeldOutImages.read(held_out)
    rows = evenly_spaced(data.samples, settings.num_images)
    few = evenly_spaced(data.samples, settings.likelihood_images)[: settings.likelihood_images]
    scores = []
    with errors_as(UsageError):
        planned = [plan(loaded, strategy=name) for name in settings.strategies or [None]]
    has_likelihood = settings.likelihood_images > 0
    for one in planned:
        model_of = one.model
        why = "" if model_of.num_domains == 1 else why_unscored(model_of.strategy, has_likelihood)
        if why:
            remedy = "score full and draw, with `likelihood_images` above 0"
            raise UsageError(f"`strategy` {model_of.strategy}: {why}; {remedy}")
        model_of.refuse_kinds(range(len(model_of.experts)))
        data.check(model_of)
    with Progress(
        len(planned) * (len(rows) * len(TIMES) + _LIKELIHOOD_UNITS * len(few)), "score"
    ) as advance:
        for one in planned:
            measured = _Scored(one.model, data, settings, advance)
            strategy = "" if len(one.model.experts) == 1 else one.model.strategy
            scores.append(
                StrategyScores(
                    strategy=strategy, levels=measured.errors(rows), bits=measured.bits(few)
                )
            )
    result = HeldOutScores(
        model=str(model),
        model_sha256=model_hash(model),
        data=HeldOutData(
            path=str(held_out),
            hash=data.hash,
            rows=tuple(rows.tolist()),
            likelihood_rows=tuple(few.tolist()),
        ),
        seed=settings.seed,
        noise_draws=settings.noise_draws,
        strategies=tuple(scores),
        versions=versions_of(_PACKAGES),
    )
    if out is not None:
        write_result(out, result, overwrite)
    return result


@dataclass(frozen=True)
class _Scored:
    """A model under a strategy, and the images that it is scored on."""

    model: Ensemble
    data: HeldOutImages
    settings: ObjectiveSettings
    advance: Progress

    @property
    def _has_velocity(self) -> bool:
        return self.model.strategy != "draw" or self.model.num_domains == 1

    def _batches(self, rows: Tensor) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Rows of each batch, and their conditions."""
        conditions = self.data.conditions(self.model)
        found = []
        for part in rows.split(self.settings.batch_size):
            found.append((part, {name: value[part] for name, value in conditions.items()}))
        return found

    def errors(self, rows: Tensor) -> tuple[LevelScore, ...]:
        """Errors of these images at `TIMES`; none where samples keep an expert of their own."""
        if not self._has_velocity:
            self.advance(len(rows) * len(TIMES))
            return ()
        by_time: dict[float, list[float]] = {time: [] for time in TIMES}
        for part, conditions in self._batches(rows):
            (flow,), _ = flows_of(self.model, conditions, len(part))
            samples = self.data.samples[part]
            for time in TIMES:
                found = velocity_errors(
                    flow.velocity,
                    samples,
                    part.tolist(),
                    time,
                    self.settings.seed,
                    self.settings.noise_draws,
                )
                by_time[time] += found.tolist()
                self.advance(len(part))
        return tuple(LevelScore(t=time, by_image=tuple(errors)) for time, errors in by_time.items())

    def _density(
        self,
        flow: int,
        share: Tensor,
        part: Tensor,
        conditions: dict[str, Tensor],
        how: LikelihoodSettings,
    ) -> Tensor:
        """Log p of these images under one flow (probes, n); -inf where it never makes images like them."""
        here = share.isfinite().nonzero()[:, 0]
        probes = how.probes_of(self.data.samples[0].numel())
        found = torch.full((probes, len(part)), -torch.inf, dtype=torch.float64)
        if len(here):
            own = {name: value[here.to(value.device)] for name, value in conditions.items()}
            flows, _ = flows_of(self.model, own, len(here))
            samples, numbers = self.data.samples[part[here]], part[here].tolist()
            found[:, here] = log_likelihood(flows[flow], samples, numbers, self.settings.seed, how)
        return found

    def bits(self, rows: Tensor) -> BitsScore | None:
        """Bits per dimension of these images; None without any."""
        if not len(rows):
            return None
        how = LikelihoodSettings(smallest=self.settings.smallest_noise)
        dimensions = self.data.samples[0].numel()
        bits, errors = [], []
        for part, conditions in self._batches(rows):
            _, shares = flows_of(self.model, conditions, len(part))
            # (flows, probes, n); flows that differ by their probes alone are averaged last.
            densities = [
                self._density(k, share, part, conditions, how) for k, share in enumerate(shares)
            ]
            total = (torch.stack(densities) + shares[:, None]).logsumexp(0)
            found = bits_per_dimension(total, dimensions, self.data.are_pixels)
            bits += found.mean(0).tolist()
            errors.append(found)
            self.advance(_LIKELIHOOD_UNITS * len(part))
        return BitsScore(
            by_image=tuple(bits),
            estimate_error=_estimate_error(torch.cat(errors, 1)),
            smallest_noise=how.smallest,
            steps=how.steps,
        )


def _estimate_error(bits: Tensor) -> float | None:
    """Standard error of the mean of bits (probes, n) that the probes add; None for exact traces."""
    probes, images = bits.shape
    if probes == 1:
        return None
    variance = bits.var(0).mean() / (probes * images)
    return variance.sqrt().item()
