"""hddm evaluate."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import UsageError
from hddm_cli.options import AsJson, InputArgument, InputOption, Overwrite


def evaluate(
    images: Annotated[
        Path,
        InputArgument(help="Folder of samples, as hddm sample writes it; or an ensemble (--strategies)."),
    ],
    reference: Annotated[Path, InputOption("--reference", help="Training images, or their partition.")],
    held_out: Annotated[
        Path | None, InputOption("--held-out", help="Images that no model has seen, or their partition.")
    ] = None,
    features: Annotated[
        str,
        typer.Option(
            "--features",
            help="auto, inception, clip, classifier (trained on --reference), or a saved classifier's file.",
        ),
    ] = "auto",
    save_classifier: Annotated[
        Path | None,
        typer.Option("--save-classifier", help="File to save the trained classifier in, to share it."),
    ] = None,
    shards: Annotated[
        Path | None, InputOption("--shards", help="Partition of the training images: distances by shard.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="JSON file for the result, for hddm compare and inspect; default: print."),
    ] = None,
    allow_few: Annotated[
        bool, typer.Option("--allow-few", help="Measure fewer images than features; not comparable.")
    ] = False,
    max_bad: Annotated[
        int, typer.Option("--max-bad", min=0, help="Broken images in all folders to skip, by name.")
    ] = 0,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            help="Compare an ensemble's samples by these strategies, comma-separated, or all.",
        ),
    ] = None,
    num_images: Annotated[int, typer.Option("--num-images", min=1, help="Samples per strategy.")] = 1000,
    store: Annotated[
        bool, typer.Option("--store", help="Make the best strategy the one that the ensemble recommends.")
    ] = False,
    as_json: AsJson = False,
    overwrite: Overwrite = False,
) -> None:
    """Measure distances, precision and recall, diversity and memorising of a folder of images.

    Memorising is judged by the training images as they are: mirrored copies are not found.
    """
    if strategies is not None:
        if out is None:
            raise UsageError("--strategies keeps samples and results in a folder; name it by --out")
        _compare_strategies(
            images, strategies, out, reference, held_out, num_images, features, allow_few, store
        )
        return
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
    ensemble: Path,
    strategies: str,
    out: Path,
    reference: Path,
    held_out: Path | None,
    num_images: int,
    features: str,
    allow_few: bool,
    store: bool,
) -> None:
    from hddm.evaluation.compare import table
    from hddm.experts.assembly_changes import change
    from hddm.pipelines.samples import SampleSettings
    from hddm.pipelines.strategies import STRATEGIES, best_of, measure_strategies

    chosen = STRATEGIES if strategies == "all" else tuple(strategies.split(","))
    settings = SampleSettings(num_images=num_images)
    groups = measure_strategies(ensemble, out, reference, held_out, chosen, settings, features, allow_few)
    typer.echo(table(groups))
    best = best_of(groups)
    typer.echo(f"least distance: {best}")
    if store:
        change(ensemble, strategy=best)
        typer.echo(f"{ensemble}: recommends {best} from now on")
    else:
        typer.echo(f"to store it: {shlex.join(['hddm', 'assemble', str(ensemble), '--strategy', best])}")
