"""What a conversion says of itself, a line a fact."""

from hddm.checkpoints.plan import TEXT, Plan
from hddm.checkpoints.sources import Source
from hddm.checkpoints.verify import LARGEST_DIFFERENCE, Verified


def summary(plan: Plan) -> list[str]:
    """What was found and what will be written."""
    source, facts, conventions = plan.source, plan.facts, plan.conventions
    low, high = conventions.schedule.range
    lines = [
        f"layout: {source.layout} ({', '.join(path.name for path in source.files)})",
        f"weights: {_weights(source)}",
        f"predicts: {conventions.prediction_type.value}"
        + (", with a learned variance that is dropped" if facts.variance_head else ""),
        f"schedule: {conventions.schedule_source}; noise range t = {low:.4f} … {high:.4f}",
        f"samples: {'×'.join(map(str, facts.sample_shape))} {facts.space}, latent scale "
        + (f"{facts.latent_scale:g}" if facts.latent_scale is not None else "not stated"),
        f"conditions: {', '.join(facts.conditions) or 'none'}"
        + (f" (null class {facts.null_class})" if facts.null_class is not None else ""),
        f"network: {plan.built.network.__name__}, {plan.parameters:,} parameters, {plan.size / 1e6:,.1f} MB",
        f"licence: {facts.licence or 'not stated by the source (--licence records it)'}",
    ]
    if facts.shift != 1:
        lines.append(f"shift: {facts.shift:.6g}, of the time grid that samples want")
    if facts.vae is not None:
        lines.append(f"vae: {facts.vae.kind}, known by its encoder {facts.vae.fingerprint}")
    if facts.text_encoder is not None:
        text = facts.text_encoder
        lines.append(f"text encoder: {text.kind} {text.fingerprint}, {text.tokens}×{text.width} tokens")
    elif TEXT in facts.conditions:
        lines.append(f"text encoder: not recorded, since {source.no_text_encoder}")
    if TEXT in plan.nulls:
        tokens = "×".join(map(str, plan.nulls[TEXT].shape))
        lines.append(f"no text: {tokens} tokens of the source's own, for guidance and calibration")
    heads = plan.facts.source.options.get("num_heads") if plan.facts.source else None
    if heads is not None:
        lines.append(f"heads: {heads}, as you said; nothing in the file can confirm it")
    if source.prefix:
        lines.append(f"prefix: {source.prefix!r} stripped from every key")
    for name, reason in source.table.benign.items():
        if name in plan.extras:
            lines.append(f"not needed: {name}, {reason}")
    if plan.built.modulation_error is not None:
        lines.append(
            f"fold: {plan.source_parameters:,} to {plan.parameters:,} parameters, relative error of the "
            f"modulation {plan.built.modulation_error:.2e}"
        )
    return lines + [f"note: {note}" for note in (*source.notes, *conventions.notes)]


def _weights(source: Source) -> str:
    if list(source.sets) == ["unstated"]:
        return "one set; the source does not say whether they are averaged"
    return f"{source.chosen} (present: {', '.join(source.sets)})"


def verdict(plan: Plan, verified: Verified | None) -> list[str]:
    """What the check of a written expert measured."""
    if verified is None:
        return ["verify: skipped"]
    if plan.is_restarted:
        return ["verify: the network runs; its head is fresh, so there is no function to compare"]
    errors = ", ".join(f"{error:.1e} at t = {t}" for t, error in verified.velocity_errors.items())
    if plan.built.modulation_error is not None:
        return [
            f"verify: outputs are off the source's by {verified.function_error:.2e} (relative, root mean "
            f"square), at most {verified.difference:.2e}; a higher --modulation-rank comes closer"
        ]
    return [
        f"verify: outputs differ from the source's by at most {verified.difference:.1e} "
        f"(limit {LARGEST_DIFFERENCE:.0e})",
        f"verify: velocity against the closed form, relative: {errors}",
    ]
