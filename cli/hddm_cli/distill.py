"""hddm distill."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hddm_cli.options import InputArgument, InputOption, Out, Overwrite, Steps, StrategyOption, refuse_given
from hddm_cli.train import LEARNING
from hddm_cli.training_options import FILE, KEEPING, LOOP, PICTURES, GivenOptions, takes

_NAMES = ("size", "prediction", "rotary", "time_sampling", "condition_dropout", "random_flip")
STUDENT = {name: LEARNING[name] for name in _NAMES}


@takes(STUDENT, LOOP, KEEPING, PICTURES, FILE)
def distill(
    context: typer.Context,
    ensemble: Annotated[Path, InputArgument(help="Ensemble folder to imitate.")],
    data: Annotated[Path, InputOption(help="Partition folder, written by hddm partition or hddm encode.")],
    out: Out,
    steps: Steps = None,
    teacher: Annotated[
        Literal["shard", "routed"],
        typer.Option(help="Teacher: the expert of each image's shard (shard) or the mixture (routed)."),
    ] = "shard",
    strategy: Annotated[
        str | None,
        StrategyOption(
            help="Strategy of the routed teacher. Default: the ensemble's; full for draw and commit-X."
        ),
    ] = None,
    init: Annotated[
        Path | None,
        InputOption(help="Flow expert to start from, such as one of the ensemble; it fixes the network."),
    ] = None,
    sampling_steps: Annotated[
        Literal["1", "2", "4"] | None,
        typer.Option(help="Number of sampling steps to train for; needs --init. Default: any."),
    ] = None,
    trajectories: Annotated[
        int,
        typer.Option(min=1, help="Teacher trajectories that the student learns from."),
    ] = 8192,
    guidance_scale: Annotated[
        float,
        typer.Option(
            help="Guidance scale of the teacher; 1 is none.", rich_help_panel="Students of few steps"
        ),
    ] = 1.0,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train one model to imitate an ensemble.

    The student costs as much as one expert per step, and with --sampling-steps it needs few steps. It is an
    expert folder. The run is saved in OUT.run; --resume continues from there.
    """
    if init is not None:
        refuse_given(context, "--init fixes it", "size", "prediction", "rotary")

    from hddm.training.distill import distill as run
    from hddm.training.expert import CALIBRATION_COST
    from hddm.training.loop import summary_of
    from hddm.training.settings import DistillSettings
    from hddm.utils.progress import TrainingProgress

    few = {
        "sampling_steps": None if sampling_steps is None else int(sampling_steps),
        "trajectories": trajectories,
        "guidance_scale": guidance_scale,
    }
    options = GivenOptions(
        context, {"steps": steps, "teacher": teacher, "strategy": strategy, **few, **given}
    )
    settings = options.settings(DistillSettings)
    # A student of few steps gets no calibration.
    after = CALIBRATION_COST if sampling_steps is None else 0
    with TrainingProgress(settings.steps, settings.batch_size, "distill", after) as progress:
        losses = run(ensemble, data, out, settings, overwrite, progress.reach, options.run(), init)
    if losses:
        name = "distance to the teacher's velocity" if sampling_steps is None else "loss"
        typer.echo(f"{out}: {summary_of(losses, name)}")
