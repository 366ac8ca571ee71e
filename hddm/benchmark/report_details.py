"""The report's tables of what models are made of, how routers answer, and all that was tried."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hddm.benchmark.numbers import number, span
from hddm.benchmark.report_cells import NOTHING, Cell, Table, count, operations, over_seeds, plain, spread
from hddm.benchmark.report_words import used_experts
from hddm.benchmark.results import MARK, Results, Verdict


def expert_errors(results: Results) -> Table | None:
    """Mean velocity error by shard and objective, over seeds, on the shard's validation images."""
    found = [one for one in used_experts(results) if one.shard is not None]
    objectives = list(dict.fromkeys(one.objective for one in found))
    shards = sorted({one.shard for one in found if one.shard is not None})
    if not shards:
        return None
    rows = []
    for shard in shards:
        own = [one for one in found if one.shard == shard]
        of = {name: [one.calibrated["mean"] for one in own if one.objective == name] for name in objectives}
        gaussian = [one.calibrated["gaussian_mean"] for one in own]
        cells = [over_seeds(values) for values in (*of.values(), gaussian)]
        least = min(of, key=lambda name: sum(of[name]) / len(of[name]) if of[name] else float("inf"))
        rows.append((Cell(f"shard {shard}", shard), *cells, Cell(least)))
    return Table("errors", ("shard", *objectives, "best linear denoiser", "least error"), tuple(rows))


def router_table(results: Results) -> Table | None:
    """How sure and how right the router of every seed is, raw and with its temperatures."""
    if not results.routers:
        return None
    rows = []
    for one in results.routers:
        cells = [Cell(f"seed {one.seed}", one.seed), plain(one.calibrated["accuracy"])]
        for key in ("cross_entropy", "ece"):
            cells += [plain(one.raw[key]), plain(one.calibrated[key])]
        low, high = min(one.temperatures), max(one.temperatures)
        rows.append((*cells, Cell(f"{low:.2f} … {high:.2f}", high)))
    head = ("router", "accuracy", "cross-entropy, raw", "calibrated", "calibration error, raw", "calibrated")
    return Table("router", (*head, "temperatures"), tuple(rows))


def expert_use(results: Results) -> Table | None:
    """Share of the weight that each expert had, over all times and images; of rows that asked the router."""
    rows = []
    for table, found in results.tables.items():
        for row in found:
            records = [one for one in results.records if (one.table, one.row) == (table, row.name)]
            asked = [one for one in records if one.use and "largest" in one.use[0]]
            if not asked:
                continue
            shares = _shares([entry["weights"] for one in asked for entry in one.use])
            remark = ", ".join(_remarks(shares))
            label = row.name if row.model in row.name else f"{row.model}, {row.name}"
            cells = (Cell(f"{share:.1%}", share) for share in shares)
            rows.append((Cell(f"{table}: {label}"), *cells, Cell(remark or "–")))
    if not rows:
        return None
    experts = max(len(row) for row in rows) - 2
    full = tuple((*row[:-1], *[NOTHING] * (experts + 2 - len(row)), row[-1]) for row in rows)
    return Table("use", ("row", *(f"expert {k}" for k in range(experts)), "remark"), full)


def tried(results: Results) -> Table:
    """Every comparison that was made, whatever it says."""
    rows = []
    for one in results.verdicts:
        ratio = NOTHING if one.ratio is None else Cell(f"{one.ratio:.3f}", one.ratio)
        rows.append(
            (
                Cell(one.row),
                Cell(one.against),
                Cell(one.table),
                Cell(number(one.gap.mean, signed=True), one.gap.mean),
                _interval(one),
                spread(one.gap, MARK if one.one_model else ""),
                ratio,
                Cell(one.judgement, kind=one.judgement),
            )
        )
    return Table(
        "tried",
        ("row", "against", "table", "gap", "95 % interval", "s, paired", "ratio", "judgement"),
        tuple(rows),
    )


def _interval(one: Verdict) -> Cell:
    if one.interval is None:
        return NOTHING
    low, high = one.interval
    return Cell(span(one.interval), high - low)


def models_table(results: Results) -> Table:
    """What every model is made of and what training it cost, of the first seed; objectives of all seeds."""
    rows = []
    objectives: dict[str, dict[str, list[int]]] = {}
    for one in results.models:
        objectives.setdefault(one.model, {}).setdefault(", ".join(one.objectives), []).append(one.seed)
    for one in results.models:
        if one.seed == results.seeds[0]:
            rows.append(
                (
                    Cell(one.model),
                    Cell(_by_seeds(objectives[one.model])),
                    Cell(", ".join(map(str, one.steps)) or "–"),
                    Cell(", ".join(map(str, one.batch_sizes)) or "–"),
                    count(one.images_seen),
                    operations(one.experts_flop),
                    operations(one.calibration_flop),
                    operations(one.router_flop),
                    operations(one.training_flop),
                    NOTHING if one.seconds is None else Cell(f"{one.seconds:,.0f}", one.seconds),
                    Cell(one.hash[:12]),
                )
            )
    head = (
        "model",
        "objectives",
        "steps",
        "batch",
        "images seen",
        "experts FLOP",
        "of it calibration",
        "router FLOP",
    )
    return Table("parts of models", (*head, "training FLOP", "seconds", "hash"), tuple(rows))


def _by_seeds(found: Mapping[str, Sequence[int]]) -> str:
    """What is the same in all seeds, or what it is in which."""
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{what} (seed {', '.join(map(str, seeds))})" for what, seeds in found.items())


def facts(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested plain values, a line each."""
    return list(_flat(content))


def _remarks(shares: Sequence[float]) -> Iterator[str]:
    for k, share in enumerate(shares):
        if share == 0:
            yield f"expert {k} is never used"
        elif share > 0.9:
            yield f"expert {k} takes over 90 %"


def _shares(weights: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(weights) for column in zip(*weights, strict=True)]


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, "–" if value is None else str(value)
