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
    ensemble: Annotated[Path, InputArgument(help="Ensemble folder, the teacher.")],
    data: Annotated[
        Path, InputOption("--data", help="Partition folder, as hddm partition or encode writes it.")
    ],
    out: Out,
    steps: Steps = None,
    teacher: Annotated[
        Literal["shard", "routed"],
        typer.Option(
            "--teacher", help="The expert of each sample's shard, or the mixture by the ensemble's strategy."
        ),
    ] = "shard",
    strategy: Annotated[
        str | None,
        StrategyOption(
            help="Mixture of the routed teacher; default: the ensemble's own, full where that is draw."
        ),
    ] = None,
    init: Annotated[
        Path | None,
        InputOption(
            "--init", help="Flow expert to begin with, one of the ensemble's say; fixes the network."
        ),
    ] = None,
    sampling_steps: Annotated[
        Literal["1", "2", "4"] | None,
        typer.Option("--sampling-steps", help="Train a student of few steps, this number; needs --init."),
    ] = None,
    trajectories: Annotated[
        int,
        typer.Option(
            "--trajectories", min=1, help="Of the teacher, that a student of few steps learns from."
        ),
    ] = 8192,
    guidance_scale: Annotated[
        float,
        typer.Option("--guidance-scale", help="Of the teacher of a student of few steps; 1 is none."),
    ] = 1.0,
    overwrite: Overwrite = False,
    **given: Any,
) -> None:
    """Train one dense flow model to do what an ensemble does, in steps of one expert's cost, or in few steps.

    The student is an expert folder. The run is kept in OUT.run; --resume goes on with it.
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
