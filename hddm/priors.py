"""What experts say together: p(k), p(k | class), and the shift of the time grid."""

from collections.abc import Sequence

from hddm.compatibility import Findings, Named

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
