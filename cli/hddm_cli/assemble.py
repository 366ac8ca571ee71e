"""hddm assemble."""

from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import MODEL, AssemblySettings, Described, Shown
from hddm.utils.addresses import Address, as_path, made_at
from hddm.utils.errors import UsageError, counted
from hddm.utils.files import check_absent, restore
from hddm.utils.records import ENSEMBLE_FILE
from hddm_cli.options import ModelArgument, Overwrite, opens_experts
from hddm_cli.usage import say

MOST = 20
"""Names of classes that are printed."""


class EnsembleChange(Described):
    """What an ensemble is made of, or what changes in one."""

    out: Path | None = None
    """Output folder, or its address; must not exist. Default: change the ensemble in place."""
    router: Annotated[str | None, Shown("FOLDER|moments|reliability")] = None
    """Router folder; moments: from the experts' data statistics; or reliability: weights by noise level."""
    add: Annotated[tuple[Path, ...], MODEL] = ()
    """Expert to add to an ensemble."""
    remove: Annotated[tuple[str, ...], Shown("EXPERT")] = ()
    """Index or name of an expert to remove."""


@opens_experts
def assemble(
    experts: Annotated[
        list[Path], ModelArgument(help="Expert folders, or one ensemble folder to change.")
    ],
    options: EnsembleChange,
    settings: AssemblySettings,
    overwrite: Overwrite = False,
) -> None:
    """Combine experts and a router into an ensemble, or change one.

    Before anything is written, hddm checks that the parts fit together.
    """
    out = None if options.out is None else as_path(options.out)
    router = options.router
    options = options.model_copy(update={"out": out})
    whole = [one for one in experts if (one / ENSEMBLE_FILE).is_file()]
    changes = bool(options.add or options.remove or whole)
    if changes and len(experts) != 1:
        if not whole:
            raise UsageError("--add and --remove change one ensemble; name it alone")
        rest = " ".join(f"--add {one}" for one in experts if one != whole[0])
        raise UsageError(
            f"{whole[0]}: is an ensemble and takes no other experts; to add them: hddm "
            f"assemble {whole[0]} {rest}"
        )
    if out is None and not changes:
        raise UsageError("--out is required, the folder to write")
    if router not in (None, "moments", "reliability"):
        restore(Path(router))
    if out is not None and not isinstance(out, Address):
        check_absent(out, ENSEMBLE_FILE, overwrite)
    from hddm.classes import join_classes
    from hddm.experts.assembly import assemble as put_together
    from hddm.experts.assembly import change
    from hddm.experts.ensemble_records import read_ensemble_record
    from hddm.experts.expert import experts_in
    from hddm.experts.parts import parts_of
    from hddm.utils.progress import Progress

    with Progress(None, "check and assemble"):
        if changes:
            notes = change(experts[0], **dict(options), settings=settings, overwrite=overwrite)
        else:
            assert out is not None
            notes = put_together(experts, out, router, settings=settings, overwrite=overwrite)
    for note in notes:
        say(f"note: {note}")
    written = out or experts[0]
    here = made_at(written)
    ensemble = read_ensemble_record(here)
    typer.echo(
        f"{written}: {counted(len(ensemble.experts), 'expert')}, strategy {ensemble.strategy}"
    )
    opened = experts_in(here, ensemble)
    parts, shares_of = parts_of(opened), []
    domains = dict.fromkeys(part.domain for part in parts)
    if len(domains) == 1 < len(parts):
        typer.echo("these experts make each image together, each at its own noise levels")
    elif ensemble.strategy == "draw":
        typer.echo("draw: one expert makes each image from beginning to end, drawn by the shares")
        if ensemble.learned is not None:
            typer.echo(
                "the router is for other strategies, such as hddm sample --strategy commit-0.92"
            )
    for first in domains:
        own = [k for k, part in enumerate(parts) if part.domain == first]
        share = sum(parts[k].weight for k in own) / sum(part.weight for part in parts)
        labels = [opened[k].member.label for k in own]
        shares_of.append(f"{' with '.join(labels)} {share:.3g}")
    typer.echo(f"shares: {', '.join(shares_of)}")
    names = join_classes(tuple(one.classes for one in opened)).names
    if names:
        typer.echo(f"classes: {', '.join(names[:MOST])}{' …' if len(names) > MOST else ''}")
