"""hddm evaluate."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hddm.utils.errors import UsageError
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
    features: Annotated[
        str,
        typer.Option(help="Features: auto, inception, clip, classifier (trained on --reference) or a file."),
    ] = "auto",
    save_classifier: Annotated[
        Path | None, typer.Option(help="File to save the trained classifier to, for other evaluations.")
    ] = None,
    shards: Annotated[
        Path | None,
        InputOption(metavar="FOLDER", help="Partition folder of the training images, for results per shard."),
    ] = None,
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
    mirrored.
    """
    if strategies is not None:
        if out is None:
            raise UsageError("--strategies keeps samples and results in a folder; name it by --out")
        of_images = ("save_classifier", "shards", "max_bad", "as_json", "overwrite")
        refuse_given(context, "does not go with --strategies", *of_images)
        from hddm.pipelines.strategies import Measure

        measure = Measure(reference, held_out, features, allow_few)
        _compare_strategies(images, strategies, out, num_images, measure, store)
        return
    if store or is_given(context, "num_images"):
        raise UsageError("--num-images and --store need --strategies, such as --strategies all")
    from hddm.evaluation.results import ResultGroup, checked, refuse_existing

    if out is not None:
        refuse_existing(out, overwrite)

    from hddm.evaluation.compare import summary
    from hddm.evaluation.evaluate import evaluate_folder
    from hddm.evaluation.images import check_images
    from hddm.utils.errors import shown
    from hddm.utils.files import write_json, write_whole
    from hddm.utils.progress import Progress

    check_images(images, "images")
    check_images(reference, "reference")
    if held_out is not None:
        check_images(held_out, "held-out")
    with Progress(None, "measure"):
        result = evaluate_folder(
            images,
            reference,
            held_out,
            allow_few,
            features=features,
            shards=shards,
            classifier=save_classifier,
            max_bad=max_bad,
        )
    for data in (result["data"].get(name) for name in ("images", "reference", "held_out")):
        if data:
            for name in shown([f"{data['path']}/{name}: cannot be read" for name in data["skipped"]]):
                typer.echo(f"skipped {name}", err=True)
    if as_json or out is None:
        table = summary(ResultGroup(str(images), (checked(images, result, ""),)))
        typer.echo(json.dumps(result, indent=2) if as_json else table)
    if out is None:
        return
    write_whole(out, lambda draft: write_json(draft, result), overwrite)
    for reason in result["reasons"]:
        typer.echo(f"{out}: not comparable: {reason}")
    if result["comparable"]:
        typer.echo(f"{out}: comparable")


def _compare_strategies(
    ensemble: Path, strategies: str, out: Path, num_images: int, measure: "Measure", store: bool
) -> None:
    from hddm.evaluation.compare import table
    from hddm.experts.assembly import change
    from hddm.pipelines.samples import SampleSettings
    from hddm.pipelines.strategies import STRATEGIES, best_of, measure_strategies

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
