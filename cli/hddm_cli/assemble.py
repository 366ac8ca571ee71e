"""hddm assemble."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hddm.utils.errors import UsageError, counted
from hddm.utils.files import check_absent, restore
from hddm.utils.records import ENSEMBLE_FILE
from hddm_cli.options import InputArgument, InputOption, Overwrite, StrategyOption

MOST = 20
"""Names of classes that are printed."""
Component = Annotated[Path | None, InputOption(help="Folder of this component. Default: the experts' own.")]


def assemble(
    experts: Annotated[list[Path], InputArgument(help="Expert folders, or one ensemble folder to change.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder; must not exist. Default: change the ensemble in place."),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|moments",
            help="Router folder, or moments: a router from the experts' data statistics, without training.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        StrategyOption(help="Recommended strategy. Default: draw."),
    ] = None,
    vae: Component = None,
    text_encoder: Component = None,
    tokenizer: Component = None,
    add: Annotated[list[Path] | None, InputOption(help="Expert to add to an ensemble.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="EXPERT", help="Index or name of an expert to remove.")
    ] = None,
    base: Annotated[
        list[Path] | None, InputOption(help="Base of LoRA experts, if it was moved since training.")
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPERT=SHARE", help="An expert's share of all data. Default: by size of its shard."
        ),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPERT,EXPERT",
            help="Experts for different noise levels of the same data. Default: those of one shard.",
        ),
    ] = None,
    classes: Annotated[
        Path | None,
        InputOption(help="YAML file with class names for experts whose classes are numbers."),
    ] = None,
    diffusers_pipeline: Annotated[
        bool, typer.Option("--diffusers-pipeline", help="Add a pipeline.py, so that diffusers opens it.")
    ] = False,
    allow_mixed_sizes: Annotated[
        bool,
        typer.Option("--allow-mixed-sizes", help="Let --add add an expert of another size or latent space."),
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Combine experts and a router into an ensemble, or change one.

    Before anything is written, hddm checks that the parts fit together.
    """
    whole = [one for one in experts if (one / ENSEMBLE_FILE).is_file()]
    changes = bool(add or remove or whole)
    if changes and len(experts) != 1:
        changed = (whole or experts)[0]
        rest = " ".join(f"--add {one}" for one in experts if one != changed)
        raise UsageError(
            f"{changed}: is an ensemble and takes no other experts; to add them: hddm "
            f"assemble {changed} {rest}"
        )
    if out is None and not changes:
        raise UsageError("--out is required, the folder to write")
    if router is not None and router != "moments":
        restore(Path(router))
        if not Path(router).exists():
            raise UsageError(f"--router {router}: no such folder; name one, or moments")
    shares = _shares(share or ())
    if out is not None:
        check_absent(out, ENSEMBLE_FILE, overwrite)
    from hddm.conditions import join_classes
    from hddm.experts.assembly import assemble as put_together
    from hddm.experts.assembly import change
    from hddm.experts.choices import read_classes
    from hddm.experts.compatibility import read_entries
    from hddm.experts.ensemble_folders import read_ensemble_facts
    from hddm.experts.parts import parts_of
    from hddm.utils.progress import Progress

    named = read_classes(classes) if classes else None
    domains = [one.split(",") for one in domain or ()]
    options: dict[str, Any] = {"vae": vae, "text_encoder": text_encoder, "tokenizer": tokenizer}
    options |= {"bases": base or (), "share": shares, "classes": named, "domain": domains}
    options["diffusers_pipeline"] = diffusers_pipeline
    with Progress(None, "check and assemble"):
        if changes:
            given = (add or (), remove or (), router, out, strategy, overwrite, allow_mixed_sizes)
            notes = change(experts[0], *given, **options)
        else:
            assert out is not None
            notes = put_together(experts, out, router, strategy, overwrite, **options)
    for note in notes:
        typer.echo(f"note: {note}")
    written = out or experts[0]
    ensemble = read_ensemble_facts(written)
    typer.echo(f"{written}: {counted(len(ensemble.experts), 'expert')}, strategy {ensemble.strategy}")
    if ensemble.strategy == "draw":
        typer.echo("draw: one expert makes each image from beginning to end, drawn by the shares")
        if ensemble.learned is not None:
            typer.echo("the router is for other strategies; hddm evaluate --strategies all compares them")
    entries = read_entries([written / one.folder for one in ensemble.experts], ensemble.experts)
    parts, shares_of = parts_of(entries), []
    for first in dict.fromkeys(part.domain for part in parts):
        own = [k for k, part in enumerate(parts) if part.domain == first]
        total = sum(parts[k].weight for k in own) / sum(part.weight for part in parts)
        shares_of.append(f"{' with '.join(entries[k].member.label for k in own)} {total:.3g}")
    typer.echo(f"shares: {', '.join(shares_of)}")
    if names := join_classes(tuple(one.classes for one in entries)).names:
        typer.echo(f"classes: {', '.join(names[:MOST])}{' …' if len(names) > MOST else ''}")


def _shares(given: Sequence[str]) -> dict[str, float]:
    shares = {}
    for one in given:
        name, _, value = one.rpartition("=")
        if name in shares:
            raise UsageError(f"--share {one}: is given twice; name each expert once")
        try:
            shares[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise UsageError(f"--share {one}: write EXPERT=0.3, the folder of an expert and its part")
    return shares
