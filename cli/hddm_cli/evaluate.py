"""hddm evaluate."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import EvaluationSettings
from hddm.utils.files import check_result_file
from hddm_cli.options import AsJson, InputArgument, InputOption, Overwrite
from hddm_cli.usage import say


def evaluate(
    images: Annotated[Path, InputArgument(help="Folder of images, such as hddm sample writes.")],
    reference: Annotated[Path, InputOption(help="Training images, or their partition folder.")],
    settings: EvaluationSettings,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file for the result. Default: print a table."),
    ] = None,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure quality, diversity and memorisation of images.

    Memorised images are not found if they are mirrored, unless --mirrored is passed.
    """
    if out is not None:
        check_result_file(out, overwrite)
    from hddm.evaluation.compare import summary
    from hddm.evaluation.evaluate import evaluate as measure
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
