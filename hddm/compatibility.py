"""Whether experts and what surrounds them belong together: from their records, before any weights.

All differences are gathered, and told a line a part. What one part records and another does not is no
difference; it is a note.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hddm.components.identity import TextEncoderFacts, VaeFacts
from hddm.errors import HddmError
from hddm.experts import ExpertFacts

Named = tuple[str, ExpertFacts]
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

    vae: VaeFacts | None = None
    vae_channels: int | None = None
    text_encoder: TextEncoderFacts | None = None
    vae_name: str = "vae"
    text_encoder_name: str = "text_encoder"


@dataclass(frozen=True)
class _Quality:
    """Something that experts must share: how it is found, whom it concerns, how it is told."""

    name: str
    of: Callable[[ExpertFacts], Hashable]
    concerns: Callable[[ExpertFacts], bool] = lambda facts: True
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


def _compare_vae(name: str, facts: ExpertFacts, vae: VaeFacts, given: Surroundings, found: Findings) -> None:
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


def _takes_text(facts: ExpertFacts) -> bool:
    return "encoder_hidden_states" in facts.conditions


def _takes_classes(facts: ExpertFacts) -> bool:
    return "class_labels" in facts.conditions


def _has_vae(facts: ExpertFacts) -> bool:
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
