"""Options that several verbs share."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hddm.utils.errors import HddmError, UsageError, choose
from hddm.utils.files import check_absent, restore
from hddm.utils.records import EXPERT_FILE


def existing(param: typer.CallbackParam, value: Any) -> Any:
    """Callback of paths that are read: one that is not there is refused before anything is imported for it.

    Raises:
        UsageError: for the first that is not there, nor was left aside by a killed process.
    """
    paths: Iterable[Path] = [value] if isinstance(value, Path) else value or ()
    for path in paths:
        if not path.exists():
            restore(path)
        if not path.exists():
            option = f"{param.opts[0]} " if param.param_type_name == "option" else ""
            raise UsageError(f"{option}{path}: no such file or folder")
    return value


def absent(context: typer.Context, value: Path) -> Path:
    """Callback of --out: what is in the way is refused before anything is imported to fill it.

    With --overwrite or --resume, which are eager, what is there may be of the right kind.

    Raises:
        HddmError: as `check_absent`.
    """
    if not (context.params.get("overwrite") or context.params.get("resume")):
        check_absent(value, EXPERT_FILE)
    return value


def refuse_other(out: Path, record: str, kind: str) -> None:
    """Refuse a folder with content but no file ``record``, which marks the ``kind`` that goes on there."""
    if out.is_dir() and any(out.iterdir()) and not (out / record).is_file():
        raise HddmError(f"{out} exists and holds no {kind}: choose another folder")


def known_strategy(value: str | None) -> str | None:
    """Callback of --strategy: refuses an unknown one before anything is imported for it."""
    # As `hddm.routers.Strategy.parse`, which imports torch.
    if value is None:
        return None
    match = re.fullmatch(r"full|draw|top-0*[1-9]\d*|(?:commit|threshold|nucleus)-(.+)", value)
    if match is None or (match[1] is not None and not _is_share(match[1])):
        raise UsageError(
            f"--strategy {value}: choose commit-X, threshold-X or nucleus-X (0 < X <= 1), top-K "
            "(K = 1, 2, …), full, or draw"
        )
    return value


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def _known_device(value: str) -> str:
    if re.fullmatch(r"(auto|cpu|cuda|mps|xpu)(:\d+)?", value) is None:
        raise UsageError(f"--device {value}: {choose(value, ('auto', 'cpu', 'cuda', 'cuda:1', 'mps'))}")
    return value


def _known_range(value: str | None) -> tuple[float, float] | None:
    from hddm.utils.records import parse_noise_range

    try:
        return None if value is None else parse_noise_range(value)
    except HddmError as error:
        raise UsageError(f"--noise-range {value}: {error.message}") from error


def refuse_given(context: typer.Context, reason: str, *names: str) -> None:
    """Refuse each parameter called one of ``names`` that was given on the command line.

    Raises:
        UsageError: with ``reason``, naming the first of them.
    """
    for name in names:
        if is_given(context, name):
            option = next(one.opts[0] for one in context.command.params if one.name == name)
            raise UsageError(f"{option}: {reason}; drop one of the two")


def is_given(context: typer.Context, name: str) -> bool:
    """True if the parameter ``name`` stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


InputArgument = functools.partial(typer.Argument, callback=existing)
InputOption = functools.partial(typer.Option, callback=existing)

Out = Annotated[Path, typer.Option(help="Output folder; must not exist.", callback=absent)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing --out.", is_eager=True)]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of all random numbers.")]
Prediction = Literal["epsilon", "sample", "v_prediction", "flow_prediction"]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "float64"],
    typer.Option(help="Number format that the networks compute in."),
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read weights from pickle files, without running their code.")
]
Variant = Annotated[str | None, typer.Option(help="Variant of the weights file, such as fp16.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
AnyDevice = Annotated[
    str, typer.Option(help="Device: auto, cpu, cuda, cuda:1 or mps.", callback=_known_device)
]
MaxBad = Annotated[
    int, typer.Option(min=0, help="Number of broken images to accept; they are listed by name.")
]
CaptionColumn = Annotated[str | None, typer.Option(help="Column of captions. Default: text or caption.")]
LabelColumn = Annotated[str | None, typer.Option(help="Column of class labels. Default: label.")]
Model = Annotated[Path, InputArgument(help="Ensemble folder, expert folder or the Paris release.")]
NoiseRange = Annotated[
    str | None,
    typer.Option(
        metavar="LOW:HIGH",
        help="Noise levels t (0 data, 1 noise) that the expert covers, such as 0.5:1. Default: all.",
        callback=_known_range,
    ),
]
StrategyOption = functools.partial(typer.Option, "--strategy", callback=known_strategy)

_UNITS = {"": 1, "B": 1} | {
    unit: size
    for power, letter in enumerate("KMG", 1)
    for unit, size in ((letter, 1000**power), (f"{letter}B", 1000**power), (f"{letter}IB", 1024**power))
}


def parse_size(text: str, option: str) -> int:
    """Bytes in ``6GB``, ``500 MB`` or ``1.5GiB``.

    Raises:
        UsageError: for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS or not float(match[1]):
        raise UsageError(f"{option} {text}: is not an amount of memory; write it as 6GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
