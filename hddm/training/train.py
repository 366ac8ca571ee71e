"""`hddm.train`: train one expert on one shard, from scratch or from another expert."""

from pathlib import Path

from hddm.networks.programs.permission import opens_programs
from hddm.settings import Report, keywords, silent
from hddm.training.continuation import continue_expert, continued_training
from hddm.training.expert import new_training, train_expert
from hddm.training.loop import OnTrainingStep, summary_of
from hddm.training.needs import needs_of_training
from hddm.training.resume import recipe_of_resumed
from hddm.training.settings import ExpertSettings, RunOptions, check_init
from hddm.utils.addresses import Address, on_disk
from hddm.utils.hub import local
from hddm.utils.needs import Needs
from hddm.utils.progress import TrainingProgress


@opens_programs
@keywords
def train(
    shard: Path,
    out: Path,
    settings: ExpertSettings,
    run: RunOptions,
    *,
    init: Path | None = None,
    schedule: Path | None = None,
    overwrite: bool = False,
    report: Report = silent,
) -> Path:
    """Train one expert on one shard, from scratch or from another expert.

    Checkpoints, logs and sample grids are saved in ``OUT.run``; ``resume=True`` continues from there, to the
    same weights. Shard and ``out`` may be addresses: see `hddm.training.remote`.

    Args:
        shard: shard folder, as ``hddm partition`` or ``hddm encode`` writes it.
        out: the expert folder.
        settings: its fields are keywords: see `hddm.training.settings.ExpertSettings`.
        run: its fields are keywords too: see `hddm.training.settings.RunOptions`.
        init: expert to continue from, with its network, prediction and schedule.
        schedule: noise schedule (DDPM only), a scheduler file of diffusers; cosine by default.
        overwrite: replace an expert in ``out``.
        report: is called with a line about the losses.

    Returns:
        ``out``.

    Raises:
        HddmError: for settings that do not fit together, the shard or ``init``, a run or an expert that is in
            the way, and steps that are not finite.
    """
    check_init(settings, init, schedule)

    def to(folder: Path, after: OnTrainingStep | None = None) -> None:
        data, start = on_disk(shard), None if init is None else local(init)
        with TrainingProgress(settings.steps, settings.batch_size, "train") as progress:
            on_step = progress.reach if after is None else _both(progress.reach, after)
            if start is not None:
                losses = continue_expert(start, data, folder, settings, overwrite, on_step, run)
            else:
                losses = train_expert(data, folder, settings, schedule, overwrite, on_step, run)
        if losses:
            report(f"{out}: {summary_of(losses)}")

    if isinstance(out, Address):
        from hddm.training.remote import train_at

        train_at(out, run, overwrite, to)
    else:
        to(out)
    return out


def _both(first: OnTrainingStep, second: OnTrainingStep) -> OnTrainingStep:
    def on_step(step: int, loss: float, seconds: float) -> None:
        first(step, loss, seconds)
        second(step, loss, seconds)

    return on_step


def needs_to_train(
    shard: Path,
    out: Path,
    settings: ExpertSettings,
    run: RunOptions,
    init: Path | None = None,
    schedule: Path | None = None,
) -> Needs:
    """Measure what `train` needs with these arguments, and write nothing."""
    check_init(settings, init, schedule)
    before = recipe_of_resumed(out, run)
    if init is None:
        return needs_of_training(new_training(shard, settings, schedule, before, run))
    return needs_of_training(continued_training(init, shard, out, settings, before, run))
