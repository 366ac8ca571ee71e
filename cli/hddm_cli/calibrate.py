"""hddm calibrate."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import CalibrationSettings
from hddm.utils.records import EXPERT_FILE
from hddm_cli.options import InputArgument, InputOption


def calibrate(
    expert: Annotated[Path, InputArgument(help="Expert folder; its calibration is replaced.")],
    settings: CalibrationSettings,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for a calibrated copy. Default: change the expert in place."),
    ] = None,
    data: Annotated[
        Path | None,
        InputOption(help="Shard folder to calibrate on. Default: samples of the expert itself."),
    ] = None,
) -> None:
    """Measure the statistics that an expert needs near pure noise.

    These are the moments of its data and the table that blends its prediction with a Gaussian's near t = 1.
    """
    from hddm.training.calibrate import recalibrate

    with contextlib.nullcontext(expert) if out is None else _copied(expert, out) as folder:
        recalibrate(folder, data, settings=settings)
    typer.echo(
        f"{out or expert}: calibrated on {data or f'{settings.num_images} samples of its own'}"
    )


@contextlib.contextmanager
def _copied(expert: Path, out: Path) -> Iterator[Path]:
    """A copy of an expert's folder, of hard links where possible, that becomes ``out`` after the block."""
    from hddm.utils.files import link_or_copy, new_folder

    with new_folder(out, EXPERT_FILE) as draft:
        for path in sorted(expert.rglob("*")):
            place = draft / path.relative_to(expert)
            if path.is_dir():
                place.mkdir()
            elif not path.name.startswith("."):
                link_or_copy(path, place)
        yield draft
