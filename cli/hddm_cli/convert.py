"""hddm convert."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from hddm.utils.errors import UsageError
from hddm.utils.files import refuse_pickle
from hddm.utils.progress import Progress
from hddm.utils.settings import Conversion
from hddm_cli.options import InputArgument, InputOption, Out, Overwrite, refuse_set
from hddm_cli.usage import say


def convert(
    source: Annotated[
        Path, InputArgument(help="Checkpoint file, model folder, pipeline folder or expert folder.")
    ],
    out: Out,
    settings: Conversion,
    base: Annotated[
        Path | None, InputOption(help="Expert that a LoRA file changes; the output is its adapter.")
    ] = None,
    to_layout: Annotated[
        str | None, typer.Option(help="Layout to write an expert back in, such as facebook-dit.")
    ] = None,
    data: Annotated[
        Path | None,
        InputOption(help="Shard of images like the model's own, to check the stated conventions on."),
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Skip the comparison with the source.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the plan, but write nothing.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Turn a pretrained checkpoint into an expert.

    The network stays the same and is read as a velocity field.
    """
    if to_layout is not None or base is not None:
        taken = {"licence"} if to_layout is None else set()
        idle = {
            "--data": data is not None,
            "--no-verify": no_verify,
            "--base": base is not None and to_layout,
        }
        why = "--to-layout writes an expert as it is" if to_layout else "--base converts a LoRA file"
        refuse_set(settings, why, *sorted(settings.model_fields_set - taken))
        for option in (option for option, is_passed in idle.items() if is_passed):
            raise UsageError(f"{option}: {why}; drop one of the two")
    if to_layout is not None:
        from hddm.checkpoints.write_back import write_back

        with Progress(None, "write back"):
            lines = write_back(source, out, to_layout, dry_run, overwrite)
        return _show(lines)
    if base is not None:
        from hddm.checkpoints.lora import convert_lora

        with Progress(None, "convert"):
            lines = convert_lora(source, base, out, settings.licence, dry_run, overwrite)
        return _show(lines)
    # Of a folder that holds both kinds, safetensors are read.
    pickles = [] if any(source.rglob("*.safetensors")) else source.rglob("diffusion_pytorch_model*.bin")
    for file in [source] if source.is_file() and source.suffix != ".json" else pickles:
        refuse_pickle(file, settings.allow_pickle)
    from hddm import convert as turn

    checks = {"data": data, "verify": not no_verify, "dry_run": dry_run}
    turn(source, out, settings=settings, overwrite=overwrite, report=say, **checks)


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)
