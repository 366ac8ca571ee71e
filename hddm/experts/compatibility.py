"""Checks that experts, router and components fit together, by their records, before weights are read.

All differences are collected and reported together, one line per part. A value that one part records and
another does not gives a note, not a difference.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hddm.data.shard_records import overlap
from hddm.ensemble import misfit_of
from hddm.experts.records import ExpertRecord, RouterRecord, ShardRecord
from hddm.utils.errors import HddmError

ClassLists = Sequence[Sequence[str]]
"""Names of each expert's classes, in its own numbering."""
SHARE_TOLERANCE = 1e-6
Named = tuple[str, ExpertRecord]
"""An expert's name for messages, mostly a folder, and its record."""


@dataclass
class Findings:
    """Differences by part, and notes."""

    differences: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def differ(self, name: str, text: str) -> None:
        """Add a difference of a part, once."""
        texts = self.differences.setdefault(name, [])
        if text not in texts:
            texts.append(text)

    def note(self, text: str) -> None:
        """Add a note for the user."""
        if text not in self.notes:
            self.notes.append(text)

    @contextmanager
    def errors_of(self, name: str) -> Iterator[None]:
        """Record an `HddmError` raised in this block as a difference of a part."""
        try:
            yield
        except HddmError as error:
            self.differ(name, "; ".join([error.message, *error.details]))

    def refuse(self, message: str = "these parts do not fit together, and nothing was written:") -> None:
        """Raise an `HddmError` with all differences, one line per part."""
        if self.differences:
            lines = [f"{name}: {'; '.join(texts)}" for name, texts in self.differences.items()]
            raise HddmError(message, lines)


def takes_text(record: ExpertRecord) -> bool:
    """True for an expert of prompts."""
    return "encoder_hidden_states" in record.conditions


def takes_classes(record: ExpertRecord) -> bool:
    """True for an expert of classes."""
    return "class_labels" in record.conditions


_QUALITIES: Mapping[str, Callable[[ExpertRecord], Any]] = {
    "sample_shape": lambda one: one.sample_shape,
    "space": lambda one: one.space,
    "latent_scale": lambda one: one.latent_scale,
    "VAE": lambda one: one.vae and one.vae.fingerprint,
    "VAE's scale": lambda one: one.vae and one.vae.scale,
    "VAE's shift": lambda one: one.vae and one.vae.shift,
}
"""Properties that experts must share; None where one does not record it, or it does not apply."""


def _lacks(record: ExpertRecord, quality: str) -> bool:
    """True where an expert should record a property, which shapes do not show, and does not."""
    should = quality == "latent_scale" or (quality == "VAE" and record.space == "latents")
    return should and _QUALITIES[quality](record) is None


def sample_kind(record: ExpertRecord) -> tuple[Any, ...]:
    """Tell the kind of an expert's samples: those of one kind can be mixed."""
    return record.sample_shape, record.space, record.vae


def compare_domains(
    experts: Sequence[Named], domains: Sequence[int], lists: ClassLists, found: Findings
) -> None:
    """Refuse domains whose noise ranges do not cover [0, 1] once, or whose experts are of unlike data."""
    for domain in dict.fromkeys(domains):
        of = [k for k, one in enumerate(domains) if one == domain]
        name, ranges = " and ".join(experts[k][0] for k in of), [experts[k][1].noise_range for k in of]
        if misfit := misfit_of(ranges):
            parts = " and ".join(f"{low:g}:{high:g}" for low, high in ranges)
            remedy = "experts of one domain cover [0, 1] once, and --domain says which are one"
            found.differ(name, f"for t in {parts}, so that {misfit}; {remedy}")
        for what, values in (
            ("shards", {shard.hash for k in of if (shard := experts[k][1].shard)}),
            ("classes", {tuple(lists[k]) for k in of}),
            ("samples or latents", {sample_kind(experts[k][1]) for k in of}),
        ):
            if len(values) > 1:
                found.differ(name, f"are of one domain, and of different {what}")


def compare_experts(experts: Sequence[Named], found: Findings, is_drawn: bool = False) -> list[str]:
    """Record each expert's differences from the most common values, of equally common ones the first.

    Experts that are drawn alone, one per sample, may make samples of several kinds. Returns the names of
    those of another kind.
    """
    for quality, of in _QUALITIES.items():
        values = [of(record) for _, record in experts]
        known = Counter(value for value in values if value is not None)
        without = [name for name, record in experts if _lacks(record, quality)]
        if known:
            usual = known.most_common(1)[0][0]
            for (name, _), value in zip(experts, values, strict=True):
                if value is not None and value != usual and not is_drawn:
                    found.differ(name, f"{quality} {_difference(value, usual)}")
            for name in without:
                found.note(f"{name} does not record its {quality}; taken on trust")
        elif len(without) > 1 and quality == "VAE":
            found.note(f"no expert records its {quality}; that all share one is taken on trust")
    students = [name for name, record in experts if record.sampling_steps is not None]
    if 0 < len(students) < len(experts) or (students and not is_drawn):
        for name in students:
            found.differ(name, "is a student of few steps; it goes with such alone, and under draw")
    return list(found.differences)


def _difference(mine: Any, usual: Any) -> str:
    if isinstance(mine, str):
        return f"{mine[:16]}, not {usual[:16]}"
    return f"{mine}, not {usual}"


def compare_shards(experts: Sequence[Named], shares: Sequence[float | None], found: Findings) -> None:
    """Refuse two domains of one shard, unless shares say how they divide its part; one expert of each."""
    first: dict[str, int] = {}
    for k, (name, record) in enumerate(experts):
        if record.shard is None or (before := first.setdefault(record.shard.hash, k)) == k:
            continue
        if None in (shares[k], shares[before]):
            other = experts[before][0]
            given = shares[k] is not None or shares[before] is not None
            missing = f"; none is given for {name if shares[k] is None else other}" if given else ""
            found.differ(
                name,
                f"was trained on the same shard ({record.shard.hash[:12]}) as {other}; leave one of the two "
                f"out, or say by --share how much of the data each stands for{missing}",
            )


def compare_classes(experts: Sequence[Named], lists: ClassLists, found: Findings) -> None:
    """Refuse experts that number their classes without names beside others that name theirs."""
    named = next((name for (name, _), own in zip(experts, lists, strict=True) if own), None)
    for (name, record), own in zip(experts, lists, strict=True):
        if named is not None and takes_classes(record) and not own:
            found.differ(name, f"numbers its classes, and {named} names them; name its classes by --classes")


def match_router(
    experts: Sequence[Named],
    outputs: Sequence[int | None],
    router: RouterRecord,
    total: int,
    found: Findings,
    name: str = "router",
) -> list[int]:
    """The router's output for each expert, one per domain: the one set in ``outputs``, else its shard's.

    Experts may come in any order, and outputs may stay unused. Where an expert, or the router, records no
    shard and no output is set, all are taken to be in the router's order, and the numbers must agree.
    ``total`` is the number of the router's outputs.
    """
    shape = Counter(record.sample_shape for _, record in experts).most_common(1)[0][0]
    if router.sample_shape != shape:
        found.differ(name, f"sample_shape {router.sample_shape}, not {shape}")
    if beyond := sorted(output for output in outputs if output is not None and output >= total):
        found.differ(name, f"has outputs 0 to {total - 1}, and the ensemble takes {beyond}")
        return []
    hashes, pairs = router.shard_hashes, list(zip(experts, outputs, strict=True))
    loose = [expert for (expert, one), set_ in pairs if set_ is None and not (one.shard and hashes)]
    if loose and (len(experts) != total or any(output is not None for output in outputs)):
        reason = "without a shard record" if hashes else "of a router that records no shards"
        found.differ(
            name,
            f"tells {total} shards apart, and there are {len(experts)} experts, of which {', '.join(loose)} "
            f"{reason} can only be matched by order",
        )
        return []
    if loose and not hashes:
        found.note(f"{name} records no shards; experts are taken to be in the order of its outputs")
    takers: dict[int, tuple[str, ShardRecord | None]] = {}
    placed = []
    for k, ((expert, record), set_) in enumerate(pairs):
        place = own = k if loose else set_
        if record.shard is not None and hashes:
            if record.shard.hash not in hashes:
                found.differ(
                    expert,
                    f"was trained on a shard that {name} does not know ({record.shard.hash[:12]}); train a "
                    "router on all shards and pass it with --router",
                )
                continue
            own = hashes.index(record.shard.hash)
            if place not in (None, own):
                found.differ(expert, f"was trained on the shard of output {own} of {name}, not {place}")
        elif expert in loose and hashes:
            found.note(f"{expert} records no shard; by its place it is taken for output {k} of the router")
        assert own is not None
        placed.append(own)
        other, shard = takers.setdefault(own, (expert, record.shard))
        # Two of one shard are refused as such.
        if other != expert and None in (shard, record.shard):
            found.differ(expert, f"takes output {own} of the router, and so does {other}")
    left = sorted(set(range(total)) - set(placed))
    if left and not found.differences:
        found.note(f"{name}: of its {total} outputs, these are left out: {', '.join(map(str, left))}")
    return placed


NO_SHIFT = 1.0


def note_overlaps(experts: Sequence[Named], found: Findings) -> None:
    """Note which experts of unlike partitions have images in common, and for which that is not known."""
    shards = [(name, record.shard) for name, record in experts if record.shard is not None]
    if len({shard.partition or shard.hash for _, shard in shards}) < 2:
        return
    for (name, mine), (other, theirs) in itertools.combinations(shards, 2):
        part = overlap(mine.sketch, theirs.sketch, mine.images, theirs.images)
        if part > 0 and (mine.partition or mine.hash) != (theirs.partition or theirs.hash):
            found.note(f"about {part:.0%} of the images of {name} are those of {other}, too")
    if silent := [name for name, shard in shards if not shard.sketch]:
        found.note(
            f"{', '.join(silent)}: record no hashes of images, so it is not known how many are others'"
        )


def common_shift(experts: Sequence[Named], found: Findings) -> float:
    """Time grid shift that all experts want, 1 where they differ."""
    shifts = [record.shift for _, record in experts]
    if len(set(shifts)) == 1:
        return shifts[0]
    all_shifts = ", ".join(f"{shift:g} ({name})" for (name, _), shift in zip(experts, shifts, strict=True))
    found.note(f"experts want different shifts of the time grid, so it has {NO_SHIFT:g}: {all_shifts}")
    return NO_SHIFT
