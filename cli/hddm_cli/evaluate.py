"""hddm evaluate."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import read_json
from hddm_cli.options import AsJson, InputArgument, InputOption, MaxBad, Overwrite, is_given, refuse_given

if TYPE_CHECKING:
    from hddm.pipelines.strategies import Measure


def evaluate(
    context: typer.Context,
    images: Annotated[
        Path, InputArgument(help="Folder of images, such as hddm sample writes, or an ensemble folder.")
    ],
    reference: Annotated[Path, InputOption(help="Training images, or their partition folder.")],
    held_out: Annotated[
        Path | None,
        InputOption(metavar="FOLDER", help="Images that no model was trained on, or their partition folder."),
    ] = None,
    validation: Annotated[
        Path | None,
        InputOption(
            metavar="FOLDER",
            help="Images to choose settings by, in place of --held-out; no model was trained on them.",
        ),
    ] = None,
    features: Annotated[
        str,
        typer.Option(help="Features: auto, inception, clip, classifier (trained on --reference) or a file."),
    ] = "auto",
    save_classifier: Annotated[
        Path | None, typer.Option(help="File to save the trained classifier to, for other evaluations.")
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=CLASS,CLASS",
            help="Classes of a domain, for results by domain; needs a classifier and class folders.",
        ),
    ] = None,
    mirrored: Annotated[
        bool,
        typer.Option("--mirrored", help="Count a mirrored training image as a copy, after --random-flip."),
    ] = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="Measure only what is fast: distances, diversity, memorisation.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON file for the result. Default: print a table."),
    ] = None,
    allow_few: Annotated[
        bool,
        typer.Option("--allow-few", help="Accept fewer images than features, marked as not comparable."),
    ] = False,
    max_bad: MaxBad = 0,
    strategies: Annotated[
        str | None,
        typer.Option(help="Strategies of an ensemble to compare, or all; --out is then a folder."),
    ] = None,
    num_images: Annotated[
        int, typer.Option(min=1, help="Samples per strategy.", rich_help_panel="Strategies")
    ] = 1000,
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
        of_images = "save_classifier max_bad as_json overwrite validation domain mirrored brief"
        refuse_given(context, "does not go with --strategies", *of_images.split())
        from hddm.pipelines.strategies import Measure

        measure = Measure(reference, held_out, features, allow_few)
        _compare_strategies(images, strategies, out, num_images, measure, store)
        return
    if store or is_given(context, "num_images"):
        raise UsageError("--num-images and --store need --strategies, such as --strategies all")
    if out is not None:
        _refuse_existing(out, overwrite)

    from hddm.evaluation.compare import summary
    from hddm.evaluation.evaluate import evaluate_folder
    from hddm.evaluation.results import Result, ResultGroup
    from hddm.utils.errors import shown
    from hddm.utils.files import write_whole
    from hddm.utils.progress import Progress

    domains = {one.partition("=")[0]: one.partition("=")[2].split(",") for one in domain or ()}
    with Progress(None, "measure"):
        result = evaluate_folder(
            images,
            reference,
            held_out,
            allow_few,
            validation=validation,
            features=features,
            domains=domains or None,
            mirrored=mirrored,
            brief=brief,
            classifier=save_classifier,
            max_bad=max_bad,
        )
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
    write_whole(out, lambda draft: draft.write_text(f"{text}\n", encoding="utf-8"), overwrite)
    for reason in result.reasons:
        typer.echo(f"{out}: not comparable: {reason}")
    if result.comparable:
        typer.echo(f"{out}: comparable")


def _refuse_existing(path: Path, overwrite: bool = False) -> None:
    """Refuse a ``path`` without a folder, and an existing file, unless a result to ``overwrite``."""
    if not path.parent.is_dir():
        raise HddmError(f"--out {path}: {path.parent} is not a folder; create it first")
    if path.is_symlink():
        to = os.readlink(path)
        raise HddmError(f"--out {path}: is a link to {to}; name the file itself, or remove the link")
    if not path.exists():
        return
    if not overwrite:
        raise HddmError(f"{path} exists: choose another file, or pass --overwrite to replace it")
    if read_json(path).get("kind") != "evaluation":
        raise HddmError(f"{path}: is not a result of an evaluation; choose another file")


def _compare_strategies(
    ensemble: Path, strategies: str, out: Path, num_images: int, measure: "Measure", store: bool
) -> None:
    from hddm.evaluation.compare import table
    from hddm.experts.assembly import change
    from hddm.pipelines.strategies import STRATEGIES, best_of, measure_strategies
    from hddm.utils.settings import SampleSettings

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
