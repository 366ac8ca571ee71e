"""hddm evaluate."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import UsageError
from hddm.utils.files import check_result_file
from hddm.utils.settings import Described, EvaluationSettings, Positive, SampleSettings, Shown
from hddm_cli.options import AsJson, InputArgument, InputOption, Overwrite, refuse_set
from hddm_cli.usage import say


class EvaluateOptions(Described):
    """What is done with results, and which strategies are compared."""

    out: Annotated[Path | None, Shown("FILE")] = None
    """JSON file for the result. Default: print a table."""
    strategies: str | None = None
    """Strategies of an ensemble to compare, or all; `out` is then a folder."""
    num_images: Annotated[Positive | None, Shown(topic="Strategies")] = None
    """Samples per strategy. Default: 1000."""
    store: bool = False
    """Save the best strategy in the ensemble folder."""


def evaluate(
    images: Annotated[
        Path, InputArgument(help="Folder of images, such as hddm sample writes, or an ensemble folder.")
    ],
    reference: Annotated[Path, InputOption(help="Training images, or their partition folder.")],
    options: EvaluateOptions,
    settings: EvaluationSettings,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure quality, diversity and memorisation of images.

    With --strategies, the images are sampled from an ensemble. Memorised images are not found if they are
    mirrored, unless --mirrored is passed.
    """
    out = options.out
    if options.strategies is not None:
        if out is None:
            raise UsageError("--strategies keeps samples and results in a folder; name it by --out")
        of_images = "save_classifier max_bad validation domain mirrored brief"
        refuse_set(settings, "does not go with --strategies", *of_images.split())
        for option, is_passed in (("--json", as_json), ("--overwrite", overwrite)):
            if is_passed:
                raise UsageError(f"{option}: does not go with --strategies; drop one of the two")
        _compare_strategies(images, reference, options.strategies, out, settings, options)
        return
    if options.store or options.num_images is not None:
        raise UsageError("--num-images and --store need --strategies, such as --strategies all")
    if out is not None:
        check_result_file(out, overwrite)
    from hddm import evaluate as measure
    from hddm.evaluation.compare import summary
    from hddm.evaluation.results import Result, ResultGroup
    from hddm.utils.errors import shown
    from hddm.utils.progress import Progress

    with Progress(None, "measure"):
        result = measure(images, reference, settings=settings, out=out, overwrite=overwrite)
    data = result.data
    for side in (data.images, data.reference, data.validation, data.held_out):
        if side is not None:
            for name in shown([f"{side.path}/{name}: cannot be read" for name in side.skipped]):
                typer.echo(f"skipped {name}", err=True)
    text = result.model_dump_json(indent=2)
    if as_json or out is None:
        group = ResultGroup(str(images), (Result(images, result, ""),))
        typer.echo(text if as_json else summary(group))
    if out is None:
        return
    for reason in result.reasons:
        say(f"{out}: not comparable: {reason}")
    if result.comparable:
        typer.echo(f"{out}: comparable")


def _compare_strategies(
    ensemble: Path,
    reference: Path,
    strategies: str,
    out: Path,
    settings: EvaluationSettings,
    options: EvaluateOptions,
) -> None:
    from hddm.evaluation.compare import table
    from hddm.experts.assembly import change
    from hddm.pipelines.strategies import STRATEGIES, Measure, best_of, measure_strategies

    measure = Measure(reference, settings.held_out, settings.features, settings.allow_few)
    asked = SampleSettings(num_images=options.num_images or 1000)
    chosen = STRATEGIES if strategies == "all" else tuple(strategies.split(","))
    groups = measure_strategies(ensemble, out, chosen, asked, measure)
    typer.echo(table(groups))
    best = best_of(groups)
    typer.echo(f"least distance: {best}")
    if options.store:
        change(ensemble, strategy=best)
        typer.echo(f"{ensemble}: recommends {best} from now on")
    else:
        typer.echo(f"to store it: {shlex.join(['hddm', 'assemble', str(ensemble), '--strategy', best])}")
