"""hddm evaluate."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import UsageError
from hddm.utils.files import check_result_file
from hddm.utils.settings import EvaluationSettings, SampleSettings
from hddm_cli.options import AsJson, InputArgument, InputOption, Overwrite, refuse_set
from hddm_cli.usage import say


def evaluate(
    images: Annotated[
        Path, InputArgument(help="Folder of images, such as hddm sample writes, or an ensemble folder.")
    ],
    reference: Annotated[Path, InputOption(help="Training images, or their partition folder.")],
    settings: EvaluationSettings,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file for the result. Default: print a table."),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(help="Strategies of an ensemble to compare, or all; --out is then a folder."),
    ] = None,
    num_images: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per strategy. Default: 1000.", rich_help_panel="Strategies"),
    ] = None,
    store: Annotated[
        bool, typer.Option("--store", help="Save the best strategy in the ensemble folder.")
    ] = False,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure quality, diversity and memorisation of images.

    With --strategies, the images are sampled from an ensemble. Memorised images are not found if they are
    mirrored, unless --mirrored is passed.
    """
    if strategies is not None:
        if out is None:
            raise UsageError("--strategies keeps samples and results in a folder; name it by --out")
        of_images = "save_classifier max_bad validation domain mirrored brief"
        refuse_set(settings, "does not go with --strategies", *of_images.split())
        for option, is_passed in (("--json", as_json), ("--overwrite", overwrite)):
            if is_passed:
                raise UsageError(f"{option}: does not go with --strategies; drop one of the two")
        _compare_strategies(images, reference, strategies, out, num_images or 1000, settings, store)
        return
    if store or num_images is not None:
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
    num_images: int,
    settings: EvaluationSettings,
    store: bool,
) -> None:
    from hddm.evaluation.compare import table
    from hddm.experts.assembly import change
    from hddm.pipelines.strategies import STRATEGIES, Measure, best_of, measure_strategies

    measure = Measure(reference, settings.held_out, settings.features, settings.allow_few)
    chosen = STRATEGIES if strategies == "all" else tuple(strategies.split(","))
    groups = measure_strategies(ensemble, out, chosen, SampleSettings(num_images=num_images), measure)
    typer.echo(table(groups))
    best = best_of(groups)
    typer.echo(f"least distance: {best}")
    if store:
        change(ensemble, strategy=best)
        typer.echo(f"{ensemble}: recommends {best} from now on")
    else:
        typer.echo(f"to store it: {shlex.join(['hddm', 'assemble', str(ensemble), '--strategy', best])}")
