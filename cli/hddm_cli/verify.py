"""hddm verify."""

from pathlib import Path
from typing import Annotated

import typer

from hddm_cli.options import Seed


def verify(
    expert: Annotated[Path, typer.Argument(help="Expert folder, of whoever trained it.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Shard folder of images kept from its training, to judge it by."),
    ] = None,
    seed: Seed = 0,
    base: Annotated[
        list[Path] | None,
        typer.Option("--base", help="Expert whose weights a LoRA expert changes, where it was moved."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, mps.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Judge an expert before it is used: records, hashes, finite weights, denoising of held-out images."""
    import json

    from hddm.errors import HddmError
    from hddm.training.verify import Verdict, verify_expert

    def show(verdict: Verdict) -> None:
        for name, sha256 in verdict.files.items():
            # As sha256sum prints it, and checks it.
            typer.echo(f"{sha256}  {verdict.folder / name}")
        if verdict.parameters is not None:
            typer.echo(f"objective: {verdict.objective}, {verdict.parameters:,} parameters, all finite")
        if verdict.base is not None:
            typer.echo(f"base: {verdict.base}")
        if verdict.trained_on is not None:
            typer.echo(f"shard: {verdict.trained_on}")
        if verdict.denoising is not None:
            found = verdict.denoising
            typer.echo(f"error of the velocity on {verdict.images} images:")
            typer.echo("     t  expert  Gaussian  v = 0")
            for level in (*found.levels, *found.late):
                typer.echo(f"  {level.t:.2f}  {level.expert:.4f}  {level.gaussian:.4f}  {level.zero:.4f}")
            typer.echo(f"mean to {found.levels[-1].t:g}  {found.expert:.4f}  {found.gaussian:.4f}")
            typer.echo(f"less than the Gaussian's by {found.margin:.4f} ± {found.deviation:.4f}")
            if verdict.unconditional is not None:
                found = verdict.unconditional
                typer.echo(f"without its conditions by {found.margin:.4f} ± {found.deviation:.4f}")
        for note in verdict.notes:
            typer.echo(f"note: {note}")

    verdict = verify_expert(expert, data, seed, base or (), device)
    if as_json:
        typer.echo(json.dumps(verdict.report(), indent=2))
    else:
        show(verdict)
    if not verdict.accepted:
        raise HddmError(f"{expert}: is refused", verdict.problems)
    if not as_json:
        typer.echo(f"{expert}: nothing speaks against it" + ("" if data else "; --data judges its denoising"))
