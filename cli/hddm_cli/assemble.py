"""hddm assemble."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import UsageError, counted
from hddm.utils.files import check_absent, restore
from hddm.utils.records import ENSEMBLE_FILE
from hddm_cli.options import InputArgument, InputOption, Overwrite, StrategyOption

MOST = 20
"""Names of classes that are printed."""
Component = Annotated[
    Path | None, InputOption(help="Folder of this component; default: what the experts keep.")
]


def assemble(
    experts: Annotated[
        list[Path], InputArgument(help="Expert folders, in any order; or one ensemble folder to change.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder to write; must not exist. Without it, an ensemble is changed in place."
        ),
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            "--router",
            metavar="<path>|moments",
            help="Router folder; moments: a router by the moments of the experts' data, without a training.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        StrategyOption(help="Strategy that the folder recommends; default: commit-0.92 with a router."),
    ] = None,
    vae: Component = None,
    text_encoder: Component = None,
    tokenizer: Component = None,
    add: Annotated[list[Path] | None, InputOption("--add", help="Expert to add to an ensemble.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", help="Index or name of an expert to take out.")
    ] = None,
    base: Annotated[
        list[Path] | None, InputOption("--base", help="Base of LoRA experts, if it was moved since training.")
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(
            "--share",
            metavar="EXPERT=0.3",
            help="An expert's part of all data; default: by size of shard.",
        ),
    ] = None,
    domain: Annotated[
        list[str] | None,
        typer.Option(
            "--domain",
            metavar="HIGH,LOW",
            help="Experts for parts of t that go together; those of one shard do so by themselves.",
        ),
    ] = None,
    classes: Annotated[
        Path | None,
        InputOption("--classes", help="YAML file of experts' class names, where they have numbers."),
    ] = None,
    diffusers_pipeline: Annotated[
        bool,
        typer.Option("--diffusers-pipeline", help="Add a pipeline.py, by which stock diffusers opens it."),
    ] = False,
    allow_mixed_sizes: Annotated[
        bool,
        typer.Option(
            "--allow-mixed-sizes", help="With --add: an expert of another size or latent space may be added."
        ),
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Put experts and a router into one ensemble folder, after checking that they fit; or change one."""
    whole = [one for one in experts if (one / ENSEMBLE_FILE).is_file()]
    changes = bool(add or remove or whole)
    if changes and len(experts) != 1:
        changed = (whole or experts)[0]
        rest = " ".join(f"--add {one}" for one in experts if one != changed)
        raise UsageError(f"{changed}: an ensemble is changed alone; hddm assemble {changed} {rest}")
    if out is None and not changes:
        raise UsageError("--out is required, the folder to write")
    if router is not None and router != "moments":
        restore(Path(router))
        if not Path(router).exists():
            raise UsageError(f"--router {router}: no such folder; name one, or moments")
    shares = _shares(share or ())
    if out is not None:
        check_absent(out, ENSEMBLE_FILE, overwrite)
    from hddm.experts.assembly import assemble as put_together
    from hddm.experts.assembly import read_classes
    from hddm.experts.assembly_changes import change
    from hddm.experts.ensemble_folders import read_ensemble_facts
    from hddm.utils.progress import Progress

    named = read_classes(classes) if classes else None
    domains = [one.split(",") for one in domain or ()]
    options = (vae, text_encoder, tokenizer, base or (), shares, named, domains, diffusers_pipeline)
    with Progress(None, "check and assemble"):
        if changes:
            notes = change(
                experts[0], add or (), remove or (), router, out, strategy, overwrite, *options,
                allow_mixed_sizes=allow_mixed_sizes,
            )  # fmt: skip
        else:
            assert out is not None
            notes = put_together(experts, out, router, strategy, overwrite, *options)
    for note in notes:
        typer.echo(f"note: {note}")
    written = out or experts[0]
    ensemble = read_ensemble_facts(written)
    typer.echo(f"{written}: {counted(len(ensemble.experts), 'expert')}, strategy {ensemble.strategy}")
    if (why := _WHY.get(ensemble.strategy.partition("-")[0])) is not None:
        typer.echo(f"{ensemble.strategy}: {why}")
    told: dict[int, tuple[str, float]] = {}
    for name, part, first in zip(ensemble.labels, ensemble.prior, ensemble.domain_of, strict=True):
        before, total = told.get(first, ("", 0.0))
        told[first] = (f"{before} with {name}" if before else name, total + part)
    typer.echo(f"shares: {', '.join(f'{name} {total:.3g}' for name, total in told.values())}")
    if names := ensemble.classes:
        typer.echo(f"classes: {', '.join(names[:MOST])}{' …' if len(names) > MOST else ''}")


_WHY = {
    "draw": "one expert makes each image from beginning to end, drawn by the shares; no router is used",
    "commit": "the router mixes all experts at high noise, then each image keeps one of them",
}
"""What the default strategies do."""


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
