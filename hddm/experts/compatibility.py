"""Whether experts and a router fit together, by their records, before weights are read.

`hddm.fit` compares experts; this module says what of their records it compares, and what a record alone can
tell: which output of a router is whose, and what is taken on trust. A value that one expert records and
another does not leads to a note, not to a difference.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from hddm.classes import join_classes
from hddm.condition_names import LABELS, TEXT
from hddm.data.shard_records import overlap
from hddm.experts.ensemble_records import numbered
from hddm.experts.expert import Expert
from hddm.experts.parts import numbers_of, vaes_of
from hddm.experts.records import RouterRecord
from hddm.experts.shares import domains_of
from hddm.fit import Candidate, Findings, compare
from hddm.networks.identity import TextEncoderRecord, VaeRecord
from hddm.router_condition import RouterCondition


def compare_experts(
    experts: Sequence[Expert], are_mixed: bool, found: Findings, are_of_one_domain: bool = False
) -> None:
    """Record all that keeps ``experts`` from being one ensemble that mixes them, or draws one per sample.

    Experts of one shard need shares, unless all ``are_of_one_domain`` and weighed by their errors.
    """
    note_unrecorded_scales(experts, found)
    compare(candidates_of(experts), are_mixed, found)
    if not are_of_one_domain:
        _compare_shares(experts, found)
    _compare_class_names(experts, found)


def candidates_of(experts: Sequence[Expert]) -> list[Candidate]:
    """What decides whether experts fit together, of their records and of what was decided on them."""
    domains, vaes = domains_of(experts), vaes_of(experts)
    candidates = []
    for one, domain, vae in zip(experts, domains, vaes, strict=True):
        record = one.record
        own = record.vae if record.unread_vae is None else vae
        kind: dict[str, Hashable] = {
            "sample_shape": record.sample_shape,
            "space": record.space,
            "latent_scale": record.latent_scale,
            "VAE": None if own is None else str(own),
        }
        if isinstance(own, VaeRecord):
            kind |= {"VAE": own.fingerprint, "VAE's scale": own.scale, "VAE's shift": own.shift}
            kind["VAE's channels"] = _statistics(own)
        else:
            kind |= {"VAE's scale": None, "VAE's shift": None, "VAE's channels": None}
        data = {"shards": record.shard and record.shard.hash, "classes": one.classes}
        is_student = record.sampling_steps is not None
        candidates.append(Candidate(one.name, kind, domain, record.noise_range, data, is_student))
    return candidates


def _statistics(vae: VaeRecord) -> str:
    """The statistics of each channel of latents, in words."""
    if not vae.mean:
        return "scaled alike"
    mean = ", ".join(f"{one:g}" for one in vae.mean)
    deviation = ", ".join(f"{one:g}" for one in vae.deviation)
    return f"scaled each by its own mean ({mean}) and deviation ({deviation})"


def note_unrecorded_scales(experts: Sequence[Expert], found: Findings) -> None:
    """Note which experts do not record their latent scale, where others do."""
    silent = [one for one in experts if one.record.latent_scale is None]
    if len(silent) < len(experts):
        for one in silent:
            found.note(f"{one.name} does not record its latent scale; taken on trust")


def _compare_shares(experts: Sequence[Expert], found: Findings) -> None:
    """Refuse domains of one shard without shares that say how they divide it."""
    domains, first = domains_of(experts), dict[str, Expert]()
    for domain in dict.fromkeys(domains):
        mine, shard = experts[domain], experts[domain].record.shard
        if shard is None:
            continue
        other = first.setdefault(shard.hash, mine)
        if other is mine:
            continue
        without = [one.name for one in (mine, other) if one.member.share is None]
        missing = f"; none is given for {without[0]}" if len(without) == 1 else ""
        if without:
            problem = f"was trained on the same shard ({shard.hash[:12]}) as {other.name}"
            found.differ(mine.name, f"{problem}; leave one out, or divide it by `share`{missing}")


def _compare_class_names(experts: Sequence[Expert], found: Findings) -> None:
    """Refuse experts that number their classes without names beside others that name theirs."""
    named = next((one.name for one in experts if one.classes), None)
    for one in experts:
        if named is not None and one.record.takes_classes and not one.classes:
            found.differ(
                one.name, f"numbers its classes, and {named} names them; name them by `classes`"
            )


def router_outputs(
    experts: Sequence[Expert],
    router: RouterRecord,
    total: int,
    found: Findings,
    name: str = "router",
) -> list[int]:
    """The router's output for each expert: the one set by hand, else its shard's; fewer where some differ.

    Experts may come in any order, and outputs may stay unused. Where an expert, or the router, records no
    shard and no output is set, all domains are taken to be in the router's order, and the numbers must agree.
    ``total`` is the number of the router's outputs.
    """
    domains, hashes = domains_of(experts), router.shard_hashes
    firsts = {domain: experts[domain] for domain in dict.fromkeys(domains)}
    shape = Counter(one.record.sample_shape for one in firsts.values()).most_common(1)[0][0]
    if router.sample_shape != shape:
        found.differ(name, f"sample_shape {router.sample_shape}, not {shape}")
    chosen = [one.member.output for one in firsts.values()]
    beyond = sorted(output for output in chosen if output is not None and output >= total)
    if beyond:
        found.differ(name, f"has outputs 0 to {total - 1}, and the ensemble takes {beyond}")
        return []
    unmatched = []
    for one in firsts.values():
        if one.member.output is None and (one.record.shard is None or not hashes):
            unmatched.append(one.name)
    if unmatched and (len(firsts) != total or set(chosen) != {None}):
        reason = "without a shard record" if hashes else "of a router that records no shards"
        problem = f"distinguishes {total} shards, and there are {len(firsts)} experts"
        found.differ(
            name, f"{problem}; {', '.join(unmatched)} {reason} can only be matched by order"
        )
        return []
    if unmatched and not hashes:
        found.note(f"{name} records no shards; experts are taken to be in the order of its outputs")
    outputs, takers = dict[int, int](), dict[int, Expert]()
    for place, (domain, one) in enumerate(firsts.items()):
        output = place if unmatched else one.member.output
        if one.record.shard is not None and hashes:
            output = _output_of(one, one.record.shard.hash, output, hashes, found, name)
            if output is None:
                continue
        elif one.name in unmatched and hashes:
            found.note(
                f"{one.name} records no shard; by its place it gets output {place} of the router"
            )
        assert output is not None
        outputs[domain] = output
        other = takers.setdefault(output, one)
        # Two of one shard are refused as such.
        if other is not one and None in (other.record.shard, one.record.shard):
            found.differ(one.name, f"takes output {output} of the router, and so does {other.name}")
    left = sorted(set(range(total)) - takers.keys())
    if left and not found.differences:
        found.note(
            f"{name}: of its {total} outputs, these are left out: {', '.join(map(str, left))}"
        )
    return [outputs[domain] for domain in domains if domain in outputs]


def _output_of(
    expert: Expert,
    shard: str,
    stated: int | None,
    hashes: Sequence[str],
    found: Findings,
    name: str,
) -> int | None:
    """The output of the router ``name`` for an expert of a ``shard``; None if it does not know that one."""
    if shard not in hashes:
        problem = f"was trained on a shard that {name} does not know ({shard[:12]})"
        found.differ(
            expert.name, f"{problem}; train a router on all shards and pass it with `router`"
        )
        return None
    own = hashes.index(shard)
    if stated not in (None, own):
        found.differ(
            expert.name, f"was trained on the shard of output {own} of {name}, not {stated}"
        )
    return own


def router_condition(
    experts: Sequence[Expert],
    router: RouterRecord,
    null_text: Tensor | None,
    found: Findings,
    name: str = "router",
) -> RouterCondition | None:
    """What a router sees of the conditions that these experts take; None where it sees none.

    Classes are matched by name, and the tokens are those of the experts' text encoder of one fingerprint.
    """
    if router.condition == "class":
        names = join_classes(tuple(one.classes for one in experts)).names
        _compare_router_classes(experts, names, router.classes, found, name)
        return RouterCondition(LABELS, torch.tensor(len(router.classes)), router.classes)
    if router.text_encoder is None or null_text is None:
        return None
    for number, one in enumerate(numbers_of(experts, "text_encoder").distinct):
        is_same = isinstance(one, TextEncoderRecord) and (
            one.fingerprint == router.text_encoder.fingerprint
        )
        if is_same:
            return RouterCondition(TEXT, null_text, given_as=numbered(TEXT, number))
    found.differ(
        name,
        f"sees prompts by a text encoder ({router.text_encoder.fingerprint}) that no expert reads by; train "
        "it on shards that were encoded with theirs",
    )
    return None


def _compare_router_classes(
    experts: Sequence[Expert],
    names: Sequence[str],
    known: Sequence[str],
    found: Findings,
    router: str,
) -> None:
    """Refuse classes without names, or of which the ``router`` sees none; note those that it does not see."""
    unnamed = [one.name for one in experts if one.record.takes_classes and not one.classes]
    for one in unnamed:
        found.differ(
            one, f"numbers its classes, and {router} sees them by name; name them by `classes`"
        )
    unknown = [one for one in names if one not in known]
    if not names and not unnamed:
        found.note(f"{router} sees classes, and no expert has any; it is asked without")
    elif unknown and len(unknown) == len(names):
        some = ", ".join(known[:5])
        found.differ(
            router,
            f"sees the classes {some}, …, of which no expert has any; rename them by `classes`",
        )
    elif unknown:
        found.note(
            f"{router} does not see {', '.join(unknown)}; these classes are routed by p(k | class)"
        )


def note_overlaps(experts: Sequence[Expert], found: Findings) -> None:
    """Note which experts of unlike partitions have images in common, and for which that is not known."""
    shards = [(one.name, one.record.shard) for one in experts if one.record.shard is not None]
    if len({shard.partition or shard.hash for _, shard in shards}) < 2:
        return
    for (name, mine), (other, theirs) in itertools.combinations(shards, 2):
        share = overlap(mine.sketch, theirs.sketch, mine.images, theirs.images)
        if share > 0 and (mine.partition or mine.hash) != (theirs.partition or theirs.hash):
            found.note(f"about {share:.0%} of the images of {name} are those of {other}, too")
    silent = [name for name, shard in shards if not shard.sketch]
    if silent:
        found.note(f"{', '.join(silent)}: record no hashes of images, so their overlap is unknown")


def common_shift(experts: Sequence[Expert], found: Findings) -> float:
    """Time grid shift that all experts want, 1 where they differ."""
    shifts = [one.record.shift for one in experts]
    if len(set(shifts)) == 1:
        return shifts[0]
    listed = ", ".join(f"{one.record.shift:g} ({one.name})" for one in experts)
    found.note(
        f"experts want different shifts of the time grid, so it has 1 ({listed}); pass `shift` to hddm "
        "sample for another one"
    )
    return 1.0
