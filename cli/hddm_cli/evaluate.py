"""hddm evaluate."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import EvaluationSettings, ObjectiveSettings
from hddm.utils.errors import UsageError
from hddm.utils.files import check_result_file
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE, Record
from hddm_cli.options import AsJson, InputArgument, InputOption, Overwrite, opens_experts
from hddm_cli.usage import say


@opens_experts
def evaluate(
    images: Annotated[
        Path,
        InputArgument(
            help="Folder of images, such as hddm sample writes; or an expert or ensemble."
        ),
    ],
    settings: EvaluationSettings,
    objective: ObjectiveSettings,
    reference: Annotated[
        Path | None,
        InputOption(help="Training images, or their partition folder. Required for images."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file for the result. Default: print a table."),
    ] = None,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure quality, diversity and memorisation of images; or score a model on held-out images.

    Memorised images are not found if they are mirrored, unless --mirrored is passed. An expert or ensemble
    is scored by its training objective, by noise level, and by its likelihood in bits per dimension.
    """
    if out is not None:
        check_result_file(out, overwrite)
    if (images / EXPERT_FILE).exists() or (images / ENSEMBLE_FILE).exists():
        _refuse_set(settings, "measures a folder of images, and this is a model", ("held_out",))
        if reference is not None:
            raise UsageError(
                f"`reference` {reference}: is for a folder of images, not a model; drop it"
            )
        _score(images, settings.held_out, objective, out, as_json, overwrite)
        return
    _refuse_set(objective, "scores an expert or an ensemble, and this is a folder of images", ())
    if reference is None:
        raise UsageError(
            "`reference`: is required; name the training images, or their partition folder"
        )
    _measure(images, reference, settings, out, as_json, overwrite)


def _refuse_set(settings: Record, why: str, taken: tuple[str, ...]) -> None:
    """Refuse options that were set and would have no effect."""
    plain = type(settings)()
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if name not in taken and value != getattr(plain, name):
            option = "strategy" if name == "strategies" else name
            raise UsageError(f"`{option}`: {why}; drop it")


def _measure(
    images: Path,
    reference: Path,
    settings: EvaluationSettings,
    out: Path | None,
    as_json: bool,
    overwrite: bool,
) -> None:
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
    if as_json or out is None:
        group = ResultGroup(str(images), (Result(images, result, ""),))
        typer.echo(result.model_dump_json(indent=2) if as_json else summary(group))
    if out is None:
        return
    for reason in result.reasons:
        say(f"{out}: not comparable: {reason}")
    if result.comparable:
        typer.echo(f"{out}: comparable")


def _score(
    model: Path,
    held_out: Path | None,
    settings: ObjectiveSettings,
    out: Path | None,
    as_json: bool,
    overwrite: bool,
) -> None:
    from hddm.objective.compare import ScoresGroup, compared
    from hddm.objective.scores import score_held_out

    if held_out is None:
        raise UsageError(
            "`held_out`: is required for a model; name images that it was not trained on"
        )
    result = score_held_out(model, held_out, settings=settings, out=out, overwrite=overwrite)
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
        return
    for line in compared([ScoresGroup(model.name, {"": result})]):
        typer.echo(line)
