"""Refuses scores on images that a model was trained on, and splits that have images in common."""

from collections.abc import Iterator
from pathlib import Path

from hddm.benchmark.lines import names_in
from hddm.benchmark.origin import Origin, is_decided
from hddm.benchmark.plan import SeedPlan
from hddm.benchmark.steps import Step
from hddm.data.shard_records import named_shards
from hddm.evaluation.score_records import Role
from hddm.evaluation.sources import refuse_trained
from hddm.utils.errors import HddmError, errors_as
from hddm.utils.work import hash_of

_MEASURED = ("held_out", "validation")
"""Parameters of trainings whose images are measured on, and not trained on."""


def refuse_shared_images(plan: SeedPlan) -> None:
    """Refuse images of the scored split that a training has too, and images of both splits.

    What was not written yet is left out: this is called again when more is done.
    """
    if not _are_done(plan.real):
        return
    images_of: dict[Path, None] = {}
    # By content, since a folder of the user may hold other images in the next start.
    learned: dict[Path, str] = {}
    for step in _learning(plan):
        for path, found in _learned_images(step):
            learned[path] = hash_of(step.identified(path))
            images_of |= dict.fromkeys(found)
    others = [step for name, step in plan.splits.items() if name != plan.file.scored_on]
    done = [step for step in others if _are_done(step)]
    content = [plan.real.identity, *(step.identity for step in done), *sorted(learned.values())]
    part = plan.work.path("splits", hash_of(content))
    if plan.work.has(part):
        return
    if not done and not images_of:
        return
    with errors_as(HddmError, "evaluate"):
        if done:
            # Imported here: it imports torch.
            from hddm.evaluation.images import read_data

            images: dict[Role, Path] = {}
            for name, step in plan.splits.items():
                images[name] = _images(step)
            # As many as the two evaluations accept.
            read_data(images, sum(step.values["max_bad"] for step in plan.splits.values()))
        refuse_trained(plan.file.scored_on, _images(plan.real), images_of)
        for step in (plan.real, *done):
            step.refuse_changed()
        for path in learned:
            plan.contents.refuse_changed(path)
    plan.work.finish(part, {})


def steps_before_first_comparison(plan: SeedPlan) -> frozenset[str]:
    """Identities of the steps that `refuse_shared_images` waits for, where none of them learns.

    They are what evaluations of real images read.
    """
    found = set()
    for step in plan.splits.values():
        for read in step.inputs.values():
            if not any(one.kind.learns for one in read.upstream):
                found.add(read.identity)
    return frozenset(found)


def steps_before_shared_images(plan: SeedPlan) -> frozenset[str]:
    """Identities of the steps after which `refuse_shared_images` has more to look at."""
    found = set()
    for step in plan.splits.values():
        found |= {read.identity for read in step.inputs.values()}
    for step in plan.all:
        if step.kind.learns or step.writes_ensemble:
            found |= {read.identity for read in step.inputs.values()}
        if step.writes_ensemble:
            found.add(step.identity)
    return frozenset(found)


def _are_done(step: Step) -> bool:
    """True if all that a step reads has been written."""
    return all(read.is_done for read in step.inputs.values())


def _images(step: Step) -> Path:
    """The images of a split, of which ``step`` is the evaluation."""
    return step.placed_path(step.values["images"])


def _learning(plan: SeedPlan) -> Iterator[Step]:
    """Steps that learn from images, and that a row comes from."""
    models = {row.model.identity: row.model for row in plan.rows}
    seen: set[str] = set()
    for model in models.values():
        if not is_decided(model):
            continue
        for step in Origin.of(model).steps:
            if step.kind.learns and step.identity not in seen:
                seen.add(step.identity)
                yield step


def _learned_images(step: Step) -> Iterator[tuple[Path, list[Path]]]:
    """Paths of the images that a step learns from, as it names them, each with its shards or itself.

    Those that were not written yet are left out.
    """
    # A step that weighs experts reads images as `hddm.objective.scores` does.
    weighs = step.writes_ensemble
    for name, path in step.paths:
        if name in _MEASURED or (weighs and name != "data"):
            continue
        if not all(step.inputs[one].is_done for one in names_in(str(path)) if one in step.inputs):
            continue
        placed = step.placed_path(path)
        found = named_shards(placed, are_held_out=weighs)
        if found:
            yield path, found
        elif weighs:
            yield path, [placed]
