"""hddm calibrate."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from hddm.settings import CalibrationSettings
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE
from hddm_cli.options import InputArgument, InputOption, opens_experts


@opens_experts
def calibrate(
    expert: Annotated[
        Path, InputArgument(help="Expert or ensemble folder; its calibration is replaced.")
    ],
    settings: CalibrationSettings,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for a calibrated copy. Default: change the expert in place."),
    ] = None,
    data: Annotated[
        Path | None,
        InputOption(
            help="Shard folder to calibrate on; for an ensemble, images that no expert was trained on. "
            "Default: samples of the expert itself."
        ),
    ] = None,
) -> None:
    """Measure the statistics that an expert needs near pure noise, or how reliable an ensemble's experts are.

    Of an expert these are the moments of its data and the table that blends its prediction with a Gaussian's
    near t = 1. Of an ensemble, weights of the experts by noise level, for which its mixture has the least
    error on --data.
    """
    if (expert / ENSEMBLE_FILE).exists():
        _weigh(expert, settings, out, data)
        return
    from hddm.experts.records import refuse_no_expert

    refuse_no_expert(expert)
    from hddm.training.calibrate import recalibrate

    with (
        contextlib.nullcontext(expert)
        if out is None
        else _copied(expert, out, EXPERT_FILE) as folder
    ):
        recalibrate(folder, data, settings=settings)
    typer.echo(
        f"{out or expert}: calibrated on {data or f'{settings.num_images} samples of its own'}"
    )


def _weigh(
    folder: Path, settings: CalibrationSettings, out: Path | None, data: Path | None
) -> None:
    from hddm.objective.checks import check_weighing
    from hddm.objective.reliability import TIMES, weigh_experts

    check_weighing(data, settings)
    assert data is not None
    with (
        contextlib.nullcontext(folder)
        if out is None
        else _copied(folder, out, ENSEMBLE_FILE) as own
    ):
        weights = weigh_experts(own, data, settings.seed)
    typer.echo(f"{out or folder}: experts are weighed on {data}")
    for time, row in zip(TIMES, weights.tolist(), strict=True):
        typer.echo(f"t = {time:g}: " + " ".join(f"{weight:.2f}" for weight in row))


@contextlib.contextmanager
def _copied(expert: Path, out: Path, record: str) -> Iterator[Path]:
    """A copy of a model's folder, of hard links where possible, that becomes ``out`` after the block."""
    from hddm.utils.copies import link_or_copy
    from hddm.utils.files import new_folder

    with new_folder(out, record) as draft:
        for path in sorted(expert.rglob("*")):
            place = draft / path.relative_to(expert)
            if path.is_dir():
                place.mkdir()
            elif not path.name.startswith("."):
                link_or_copy(path, place)
        yield draft
