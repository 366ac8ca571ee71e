"""hddm distill."""

from pathlib import Path
from typing import Annotated

from hddm.training.settings import DistillSettings, RunOptions, check_init
from hddm_cli.options import (
    Config,
    DryRun,
    InputOption,
    ModelArgument,
    ModelOption,
    Out,
    Overwrite,
    Without,
    checked_by,
    opens_experts,
)
from hddm_cli.train import refuse_unfinished
from hddm_cli.usage import say, show


def check_student(settings: DistillSettings, init: Path | None) -> None:
    """Refuse settings of a student that do not go with what it begins with."""
    check_init(settings, init)


@opens_experts
@checked_by(check_student)
def distill(
    ensemble: Annotated[Path, ModelArgument(help="Ensemble folder to imitate.")],
    data: Annotated[
        Path, InputOption(help="Partition folder, written by hddm partition or hddm encode.")
    ],
    out: Out,
    settings: DistillSettings,
    run: Annotated[RunOptions, Without(("held_out", "validate_every"))],
    init: Annotated[
        Path | None,
        ModelOption(
            help="Flow expert to start from, such as one of the ensemble; it fixes the network."
        ),
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    config: Config = None,
) -> None:
    """Train one model to imitate an ensemble.

    The student costs as much as one expert per step, and with --sampling-steps it needs few steps. It is an
    expert folder. The run is saved in OUT.run; --resume continues from there.
    """
    check_student(settings, init)
    from hddm.experts.records import refuse_no_model

    refuse_no_model(ensemble)
    if dry_run:
        from hddm.training.distill import needs_of_student

        show(needs_of_student(ensemble, data, out, settings, run, init))
        return
    refuse_unfinished(out, run, overwrite)

    from hddm.training.distill import distill as train
    from hddm.training.loop import summary_of
    from hddm.utils.progress import TrainingProgress

    with TrainingProgress(settings.steps, settings.batch_size, "distill") as progress:
        losses = train(ensemble, data, out, settings, overwrite, progress.reach, run, init)
    if losses:
        is_of_velocities = settings.sampling_steps is None
        name = "distance to the teacher's velocity" if is_of_velocities else "loss"
        say(f"{out}: {summary_of(losses, name)}")
