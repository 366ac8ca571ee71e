"""Whether experts and what surrounds them belong together: from their records, before any weights.

All differences are gathered, and told a line a part. What one part records and another does not is no
difference; it is a note.

Which output of a router belongs to which expert: told by the shard, not by the order.

What experts say together: p(k), p(k | class), and the shift of the time grid.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hddm.experts.records import ExpertRecord, RouterRecord
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.utils.errors import HddmError

Named = tuple[str, ExpertRecord]
"""An expert's name for messages, a folder most often, and its record."""


@dataclass
class Findings:
    """Differences by the part that has them, and notes."""

    differences: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def differ(self, name: str, text: str) -> None:
        """Add a difference of a part, once."""
        texts = self.differences.setdefault(name, [])
        if text not in texts:
            texts.append(text)

    def note(self, text: str) -> None:
        """Add what a user should know, though it stops nothing."""
        if text not in self.notes:
            self.notes.append(text)

    def refuse(self, message: str = "these parts do not fit together, and nothing was written:") -> None:
        """Raise all differences at once.

        Raises:
            HddmError: with a detail line a part.
        """
        if self.differences:
            lines = [f"{name}: {'; '.join(texts)}" for name, texts in self.differences.items()]
            raise HddmError(message, lines)


@dataclass(frozen=True)
class Surroundings:
    """What is to stand beside experts of latents; None for what is not given.

    ``vae_channels`` are those of its latents.
    """

    vae: VaeRecord | None = None
    vae_channels: int | None = None
    text_encoder: TextEncoderRecord | None = None
    vae_name: str = "vae"
    text_encoder_name: str = "text_encoder"


@dataclass(frozen=True)
class _Quality:
    """Something that experts must share: how it is found, whom it concerns, how it is told."""

    name: str
    of: Callable[[ExpertRecord], Hashable]
    concerns: Callable[[ExpertRecord], bool] = lambda facts: True
    told: Callable[[Any, Any], str] = "{0}, not {1}".format


def compare_experts(experts: Sequence[Named], found: Findings) -> None:
    """Note everything in which an expert differs from most, or from the first where none are most."""
    for quality in _QUALITIES:
        values = [quality.of(facts) if quality.concerns(facts) else None for _, facts in experts]
        known = [value for value in values if value is not None]
        if not known:
            if len(experts) > 1 and quality.name in _TRUSTED and any(quality.concerns(f) for _, f in experts):
                found.note(f"no expert records its {quality.name}; that all share one is taken on trust")
            continue
        usual = Counter(known).most_common(1)[0][0]
        for (name, facts), value in zip(experts, values, strict=True):
            if value is not None and value != usual:
                found.differ(name, f"{quality.name} {quality.told(value, usual)}")
            elif value is None and quality.concerns(facts):
                found.note(f"{name} does not record its {quality.name}; taken on trust")
    _compare_shards(experts, found)


def _compare_shards(experts: Sequence[Named], found: Findings) -> None:
    first: dict[str, str] = {}
    for name, facts in experts:
        if facts.shard is None:
            continue
        if facts.shard.hash not in first:
            first[facts.shard.hash] = name
        elif first[facts.shard.hash] == name:
            found.differ(name, "is named twice; name it once")
        else:
            found.differ(
                name,
                f"was trained on the same shard ({facts.shard.hash[:12]}) as {first[facts.shard.hash]}; "
                "an ensemble takes one expert a shard: leave one of the two out",
            )


def compare_surroundings(experts: Sequence[Named], given: Surroundings, found: Findings) -> None:
    """Hold a VAE and a text encoder against what the experts record."""
    latents = [(name, facts) for name, facts in experts if facts.space == "latents"]
    texts = [(name, facts) for name, facts in experts if _takes_text(facts)]
    if given.vae is not None:
        if not latents:
            found.differ(given.vae_name, "a VAE, and these experts make pixels; leave it out")
        for name, facts in latents:
            _compare_vae(name, facts, given.vae, given, found)
    if given.text_encoder is not None:
        if not texts:
            found.differ(given.text_encoder_name, "a text encoder, and none of these experts takes text")
        for name, facts in texts:
            if facts.text_encoder is None:
                found.note(f"{name} does not record its text encoder; taken on trust")
                continue
            for key in ("fingerprint", "width", "tokens"):
                mine, theirs = getattr(given.text_encoder, key), getattr(facts.text_encoder, key)
                if mine != theirs:
                    found.differ(given.text_encoder_name, f"{key} {mine}, and {name} records {theirs}")


def _compare_vae(
    name: str, facts: ExpertRecord, vae: VaeRecord, given: Surroundings, found: Findings
) -> None:
    channels = facts.sample_shape[0]
    if given.vae_channels not in (None, channels):
        found.differ(given.vae_name, f"{given.vae_channels} latent channels, and {name} has {channels}")
    if facts.vae is not None and facts.vae.kind != vae.kind:
        # A distilled VAE of the same latents has other weights and another scale of its own.
        found.note(
            f"{given.vae_name} is an {vae.kind}, and {name} records an {facts.vae.kind}; taken on trust"
        )
        return
    if facts.vae is None:
        found.note(f"{name} does not record its VAE; taken on trust")
        if (
            facts.latent_scale is not None
            and vae.kind != "AutoencoderTiny"
            and facts.latent_scale != vae.scale
        ):
            found.differ(given.vae_name, f"scale {vae.scale:g}, and {name} has {facts.latent_scale:g}")
        return
    for key in ("fingerprint", "scale", "shift"):
        mine, theirs = getattr(vae, key), getattr(facts.vae, key)
        if mine != theirs:
            found.differ(given.vae_name, f"{key} {mine}, and {name} records {theirs}")


def _takes_text(facts: ExpertRecord) -> bool:
    return "encoder_hidden_states" in facts.conditions


def _takes_classes(facts: ExpertRecord) -> bool:
    return "class_labels" in facts.conditions


def _has_vae(facts: ExpertRecord) -> bool:
    return facts.space == "latents"


def _told_classes(mine: tuple[str, ...], usual: tuple[str, ...]) -> str:
    if len(mine) != len(usual):
        return f"of {len(mine)} classes, not {len(usual)}"
    k = next(k for k, pair in enumerate(zip(mine, usual, strict=True)) if pair[0] != pair[1])
    return f"has {mine[k]!r} as class {k}, not {usual[k]!r}"


def _told_short(mine: str, usual: str) -> str:
    return f"{mine[:12]}, not {usual[:12]}"


# What shapes do not show, so that silence about it would mislead.
_TRUSTED = ("VAE", "text encoder")
_QUALITIES = (
    _Quality("sample_shape", lambda f: f.sample_shape),
    _Quality("space", lambda f: f.space),
    _Quality("latent_scale", lambda f: f.latent_scale),
    _Quality("VAE", lambda f: f.vae and f.vae.fingerprint, _has_vae),
    _Quality("VAE's scale", lambda f: f.vae and f.vae.scale, lambda f: f.vae is not None),
    _Quality("VAE's shift", lambda f: f.vae and f.vae.shift, lambda f: f.vae is not None),
    _Quality("text encoder", lambda f: f.text_encoder and f.text_encoder.fingerprint, _takes_text),
    _Quality("text width", lambda f: f.text_encoder and f.text_encoder.width, lambda f: bool(f.text_encoder)),
    _Quality("tokens", lambda f: f.text_encoder and f.text_encoder.tokens, lambda f: bool(f.text_encoder)),
    _Quality("class map", lambda f: f.classes or None, _takes_classes, _told_classes),
    _Quality("null class", lambda f: f.null_class, _takes_classes),
    _Quality("number of shards", lambda f: f.shard and f.shard.num_shards, lambda f: f.shard is not None),
    _Quality(
        "partition", lambda f: f.shard and f.shard.partition, lambda f: f.shard is not None, _told_short
    ),
)


def match_router(
    experts: Sequence[Named],
    router: RouterRecord,
    found: Findings,
    name: str = "router",
    before: Sequence[int | None] = (),
    total: int | None = None,
) -> tuple[int, ...]:
    """The router's output for each expert: that of the expert's shard.

    Experts may come in any order, and some outputs may be left out. Where an expert records no shard, all
    are taken to be in the router's order, and there must be as many; so too where the router records none.

    Args:
        experts: in the order of the ensemble.
        router: what it tells apart.
        found: takes differences and notes.
        name: of the router, for messages.
        before: outputs that are settled, None for an expert without; empty for none.
        total: number of its outputs; by default that of the shards in its record.
    """
    shape = Counter(facts.sample_shape for _, facts in experts).most_common(1)[0][0]
    if router.sample_shape != shape:
        found.differ(name, f"sample_shape {router.sample_shape}, not {shape}")
    settled = before or [None] * len(experts)
    total = len(router.shard_hashes) if total is None else total
    if len(router.shard_hashes) not in (0, total):
        found.differ(name, f"names {len(router.shard_hashes)} shards, and has {total} outputs")
        return ()
    if beyond := sorted(output for output in settled if output is not None and output >= total):
        found.differ(name, f"has outputs 0 to {total - 1}, and the ensemble takes {beyond}")
        return ()
    loose = [
        expert
        for (expert, facts), output in zip(experts, settled, strict=True)
        if output is None and not (facts.shard and router.shard_hashes)
    ]
    if loose and (len(experts) != total or any(output is not None for output in settled)):
        told = "without a shard record" if router.shard_hashes else "of a router that records no shards"
        found.differ(
            name,
            f"tells {total} shards apart, and there are {len(experts)} experts, of which {', '.join(loose)} "
            f"{told} can only be matched by order",
        )
        return ()
    if loose and not router.shard_hashes:
        found.note(f"{name} records no shards; experts are taken to be in the order of its outputs")
    outputs = []
    takers: dict[int, list[str]] = {}
    for k, ((expert, facts), output) in enumerate(zip(experts, settled, strict=True)):
        if output is None and (facts.shard is None or not router.shard_hashes):
            if router.shard_hashes:
                found.note(
                    f"{expert} records no shard; by its place it is taken for output {k} of the router"
                )
            outputs.append(k)
            takers.setdefault(k, []).append(expert)
            continue
        by_shard = _output_of(facts, router)
        if facts.shard is not None and by_shard is None and router.shard_hashes:
            found.differ(
                expert,
                f"was trained on a shard that {name} does not know ({facts.shard.hash[:12]}); train a router "
                "on all shards and pass it with --router",
            )
        expected = k if loose else output
        if by_shard is not None and expected is not None and by_shard != expected:
            found.differ(expert, f"was trained on the shard of output {by_shard} of {name}, not {expected}")
        outputs.append(next(o for o in (by_shard, expected, k) if o is not None))
        if by_shard is not None or expected is not None:
            takers.setdefault(outputs[-1], []).append(expert)
    _refuse_shared(experts, takers, found)
    left = sorted(set(range(total)) - set(outputs))
    if left and not found.differences:
        found.note(f"{name}: of its {total} outputs, these are left out: {', '.join(map(str, left))}")
    return tuple(outputs)


def check_together(
    experts: Sequence[Named], router: RouterRecord | None = None, outputs: Sequence[int] = ()
) -> None:
    """Refuse the parts of an ensemble folder that do not fit together, as after a hand has changed it.

    Args:
        experts: in the order of the ensemble.
        router: what its router tells apart.
        outputs: of the router for each expert, as in ``ensemble.json``; empty where they are in order.

    Raises:
        HddmError: with every difference, a line a part.
    """
    found = Findings()
    compare_experts(experts, found)
    if router is not None:
        settled = list(outputs or range(len(experts)))
        if not outputs and len(router.shard_hashes) != len(experts):
            found.differ("router", f"tells {len(router.shard_hashes)} shards apart, not {len(experts)}")
        else:
            match_router(experts, router, found, before=settled)
    found.refuse("the parts of this ensemble do not fit together; assemble it anew:")


def _refuse_shared(experts: Sequence[Named], takers: Mapping[int, list[str]], found: Findings) -> None:
    """An output is one expert's; that two record one shard is told where experts are compared."""
    hashes = {name: facts.shard.hash if facts.shard else name for name, facts in experts}
    for output, names in takers.items():
        if len({hashes[name] for name in names}) > 1:
            for name in names:
                others = ", ".join(other for other in names if other != name)
                found.differ(name, f"takes output {output} of the router, and so does {others}")


def _output_of(facts: ExpertRecord, router: RouterRecord) -> int | None:
    if facts.shard is None or facts.shard.hash not in router.shard_hashes:
        return None
    return router.shard_hashes.index(facts.shard.hash)


NO_SHIFT = 1.0


def prior_of(
    experts: Sequence[Named], found: Findings, before: Sequence[float] | None = None
) -> tuple[float, ...]:
    """p(k): shard sizes, as shares.

    Where an expert's is unknown, ``before`` (positive in sum), or equal ones.
    """
    sizes: list[float] = [facts.shard.images for _, facts in experts if facts.shard]
    if len(sizes) < len(experts):
        unknown = ", ".join(name for name, facts in experts if not facts.shard)
        kept = "keeps its proportions" if before else "is equal for all"
        if len(experts) > 1:
            found.note(f"{unknown}: no shard is recorded, so the prior {kept}")
        sizes = list(before or [1] * len(experts))
    return tuple(size / sum(sizes) for size in sizes)


def class_prior_of(
    experts: Sequence[Named], prior: Sequence[float], found: Findings
) -> tuple[tuple[float, ...], ...]:
    """p(k | class), a row a class: the images of the class in each shard, as shares.

    Empty where experts know no classes, or one does not count its images by them. A class that no shard
    holds has ``prior``.
    """
    classes = next((facts.classes for _, facts in experts if facts.classes), ())
    counts = [facts.shard.class_images if facts.shard else () for _, facts in experts]
    without = [name for (name, _), one in zip(experts, counts, strict=True) if len(one) != len(classes)]
    if not classes or len(experts) == 1:
        return ()
    if without:
        found.note(
            f"p(k | class) is unknown, so 'draw' knows p(k) only: {', '.join(without)} counts no classes"
        )
        return ()
    rows = list(zip(*counts, strict=True))
    empty = [name for name, row in zip(classes, rows, strict=True) if not sum(row)]
    if empty:
        found.note(f"no shard has images of {', '.join(empty)}; 'draw' takes p(k) for them")
    return tuple(tuple(n / sum(row) for n in row) if sum(row) else tuple(prior) for row in rows)


def common_shift(experts: Sequence[Named], found: Findings) -> float:
    """Shift of the time grid that all experts want, 1 where they differ."""
    shifts = [facts.shift for _, facts in experts]
    if len(set(shifts)) == 1:
        return shifts[0]
    told = ", ".join(f"{shift:g} ({name})" for (name, _), shift in zip(experts, shifts, strict=True))
    found.note(f"experts want different shifts of the time grid, so the ensemble has {NO_SHIFT:g}: {told}")
    return NO_SHIFT
