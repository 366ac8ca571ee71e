"""hddm verify."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hddm.settings import READ, Described, DeviceName, InputPath
from hddm.utils.errors import HddmError, UsageError
from hddm.utils.files import read_json
from hddm.utils.records import ENSEMBLE_FILE, EXPERT_FILE, MANIFEST, Seed
from hddm_cli.options import AsJson, ModelArgument, opens_experts
from hddm_cli.usage import say

if TYPE_CHECKING:
    from hddm.experts.verify import Verification


class VerifySettings(Described):
    """How experts are checked."""

    device: DeviceName = "auto"
    """Device: auto, cpu, cuda, cuda:1 or mps."""
    data: InputPath | None = None
    """Held-out shard to measure the denoising error on, or a folder of such shards."""
    seed: Seed = 0
    """Seed of all random numbers."""
    base: Annotated[tuple[Path, ...], READ] = ()
    """Base of LoRA experts, if it was moved since training."""


@opens_experts
def verify(
    expert: Annotated[
        Path, ModelArgument(help="Expert folder, ensemble folder or a folder of experts.")
    ],
    settings: VerifySettings,
    as_json: AsJson = False,
) -> None:
    """Check experts before use: hashes, weights, denoising error.

    All files of an ensemble are checked, including a pipeline.py, which diffusers would run. Exits with 0 if
    every expert is accepted, 1 if one is refused, 2 for wrong usage.
    """
    data, experts = settings.data, _experts_in(expert)
    images = [None] * len(experts) if data is None else _images_for(experts, data)
    from hddm.experts.verify import problems_around, verify_expert
    from hddm.utils.progress import Progress

    is_one = experts == [expert]
    verdicts = []
    for folder, shard in zip(experts, images, strict=True):
        with Progress(None, f"verify {folder}"):
            verdicts.append(
                verify_expert(folder, shard, settings.seed, settings.base, settings.device)
            )
        if not as_json:
            hint = ""
            if data and shard is None:
                hint = "; it records no shard, so it was not tested on images"
            elif not data and is_one:
                hint = "; pass --data to measure the denoising error too"
            _show_line(verdicts[-1], hint)
            if is_one:
                _show(verdicts[-1])
    if as_json:
        reports = [verdict.report() for verdict in verdicts]
        typer.echo(json.dumps(reports[0] if is_one else reports, indent=2))
    around = problems_around(expert)
    refused = [verdict for verdict in verdicts if not verdict.accepted]
    if refused or around:
        of = "" if is_one or not refused else f"{len(refused)} of {len(experts)} experts "
        lines = []
        for verdict in refused:
            lines += [f"{verdict.folder}: {problem}" for problem in verdict.problems]
        raise HddmError(f"{expert}: {of}failed", lines + around)
    if not (as_json or is_one):
        hint = "" if data else "; pass --data to measure the denoising error too"
        typer.echo(f"{expert}: all {len(experts)} experts passed{hint}")


def _experts_in(folder: Path) -> list[Path]:
    """Return ``folder`` if it is an expert, else the experts of an ensemble, or those right below by number.

    Raises `UsageError` for any other folder.
    """
    if (folder / EXPERT_FILE).exists():
        return [folder]
    if (folder / ENSEMBLE_FILE).exists():
        from hddm.experts.ensemble_records import read_ensemble_record

        return [folder / one.folder for one in read_ensemble_record(folder).experts]
    found = [path.parent for path in folder.glob(f"*/{EXPERT_FILE}")]
    if not found:
        text = "nor does a folder in it; name the folder of an expert, an ensemble, or experts"
        raise UsageError(f"{folder}: holds no {EXPERT_FILE}, {text}")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _images_for(experts: Sequence[Path], data: Path) -> Sequence[Path | None]:
    """Return the shard folder to judge each of ``experts`` by.

    ``data`` is one shard folder for all, or a folder of shards, of which each expert gets its own; where
    there is none, `UsageError` is raised. Of several experts one that was converted gets None.
    """
    folders = sorted(path.parent for path in data.glob(f"*/{MANIFEST}"))
    below = [folder for folder in folders if not (folder / EXPERT_FILE).exists()]
    if (data / MANIFEST).exists() or not below:
        return [data] * len(experts)
    from hddm.data.shard_records import LARGEST_MANIFEST

    shards = {}
    for folder in below:
        record = read_json(folder / MANIFEST, LARGEST_MANIFEST)
        shards[str(record.get("held_out_of") or record.get("hash"))] = folder
    found: list[Path | None] = []
    for expert in experts:
        own = (read_json(expert / EXPERT_FILE).get("shard") or {}).get("hash")
        if own not in shards and (own is not None or len(experts) == 1):
            origin = "does not say what it was trained on"
            if own is not None:
                origin = f"is of shard {str(own)[:16]}…"
            text = f"none of its {len(shards)} shards is that of {expert}, which {origin}"
            raise UsageError(f"`data` {data}: {text}")
        found.append(None if own is None else shards[own])
    return found


def _show(verdict: "Verification") -> None:
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
            typer.echo(
                f"  {level.t:.2f}  {level.expert:.4f}  {level.gaussian:.4f}  {level.zero:.4f}"
            )
        typer.echo(f"mean to {found.levels[-1].t:g}  {found.expert:.4f}  {found.gaussian:.4f}")
        typer.echo(f"less than the Gaussian's by {found.margin:.4f} ± {found.deviation:.4f}")
    typer.echo("SHA-256 of its files, as sha256sum -c checks them:")
    for name, sha256 in verdict.files.items():
        typer.echo(f"{sha256}  {verdict.folder / name}")


def _show_line(verdict: "Verification", hint: str) -> None:
    line = "passed" if verdict.accepted else "failed"
    if verdict.denoising is not None:
        found = verdict.denoising
        line += f"; error {found.expert:.4f} on {verdict.images} images (a Gaussian: {found.gaussian:.4f})"
    say(f"{verdict.folder}: {line}{hint if verdict.accepted else ''}")
    for note in verdict.notes:
        say(f"  note: {note}")
