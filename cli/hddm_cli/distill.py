"""hddm distill."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hddm.training.settings import FIXED_BY_INIT, DistillSettings, RunOptions
from hddm_cli.options import InputArgument, InputOption, Out, Overwrite, StrategyOption, refuse_given
from hddm_cli.training_options import GivenOptions, takes


@takes(DistillSettings, RunOptions)
def distill(
    context: typer.Context,
    ensemble: Annotated[Path, InputArgument(help="Ensemble folder to imitate.")],
    data: Annotated[Path, InputOption(help="Partition folder, written by hddm partition or hddm encode.")],
    out: Out,
    strategy: Annotated[
        str | None, StrategyOption(help=DistillSettings.model_fields["strategy"].description)
    ] = None,
    init: Annotated[
        Path | None,
        InputOption(help="Flow expert to start from, such as one of the ensemble; it fixes the network."),
    ] = None,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train one model to imitate an ensemble.

    The student costs as much as one expert per step, and with --sampling-steps it needs few steps. It is an
    expert folder. The run is saved in OUT.run; --resume continues from there.
    """
    if init is not None:
        refuse_given(context, "--init fixes it", *FIXED_BY_INIT)

    from hddm.training.distill import distill as run
    from hddm.training.fitting import CALIBRATION_COST
    from hddm.training.loop import summary_of
    from hddm.utils.progress import TrainingProgress

    options = GivenOptions(context, {"strategy": strategy, **given})
    settings = options.settings(DistillSettings)
    is_of_velocities = settings.sampling_steps is None
    # A student of few steps gets no calibration.
    after = CALIBRATION_COST if is_of_velocities else 0
    with TrainingProgress(settings.steps, settings.batch_size, "distill", after) as progress:
        losses = run(ensemble, data, out, settings, overwrite, progress.reach, options.run(), init)
    if losses:
        name = "distance to the teacher's velocity" if is_of_velocities else "loss"
        typer.echo(f"{out}: {summary_of(losses, name)}")
