"""Options of verbs: the fields of settings records, and the few that several verbs share.

A verb is a function. Of a parameter whose type is a record, every field becomes an option (`takes`); the verb
gets the record, made of the options on the command line and of the keys of a run file (``--config``), if it
takes one. Fields that were passed are the record's ``model_fields_set``.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BeforeValidator

from hddm.settings import MODEL, READ, Shown
from hddm.training.settings import settings_of
from hddm.utils.addresses import Address, address_of, as_path, on_disk, refuse_address
from hddm.utils.errors import HddmError, UsageError, errors_as
from hddm.utils.files import check_absent, is_empty, restore
from hddm.utils.hub import HubName, local
from hddm.utils.records import EXPERT_FILE, Record
from hddm_cli.usage import Verb, as_typed


def existing(param: typer.CallbackParam, value: Any) -> Any:
    """Callback of paths that are read: one that is not there is refused before anything is imported for it.

    What is at an address is fetched.

    Raises:
        UsageError: for the first that is not there, nor was left aside by a killed process.
        HddmError: as `hddm.utils.addresses.on_disk`.
    """
    found = each_of(value, on_disk)
    refuse_missing(param, found)
    return found


def each_of(value: Any, read: Callable[[Path], Path]) -> Any:
    """``read`` of a path, or of each of several; None where there is none."""
    if isinstance(value, Path):
        return read(value)
    return [read(path) for path in value] if value else value


def refuse_missing(param: typer.CallbackParam, value: Any) -> None:
    """Refuse the first path that is not on this machine, but for addresses; raises as `existing`."""
    paths: Iterable[Path] = [value] if isinstance(value, Path) else value or ()
    for path in paths:
        if isinstance(path, Address):
            continue
        if not path.exists():
            restore(path)
        if not path.exists():
            option = f"{param.opts[0]} " if param.param_type_name == "option" else ""
            raise UsageError(f"{option}{path}: no such file or folder")


def addressed(param: typer.CallbackParam, value: Any) -> Any:
    """Callback of paths that are read part by part: what is at an address is fetched when it is read.

    Raises:
        UsageError: as `existing`.
    """
    found = each_of(value, as_path)
    refuse_missing(param, found)
    return found


def downloaded(param: typer.CallbackParam, value: Any) -> Any:
    """Callback of paths of models: a name on a hub, or an address, becomes where it is downloaded to.

    Raises:
        HddmError: as `hddm.utils.hub.local`, and as `existing`.
    """
    found = each_of(value, local)
    refuse_missing(param, found)
    return found


def named(param: typer.CallbackParam, value: Any) -> Any:
    """Callback of paths of models of which other options say what is downloaded: a name stays one.

    Raises:
        UsageError: as `existing`.
    """
    return value if HubName.parse(str(value)) is not None else addressed(param, value)


def on_this_machine(value: Path) -> Path:
    """Callback of --out of verbs that look at it themselves; raises as `refuse_address`."""
    refuse_address(value)
    return value


def absent_or_address(context: typer.Context, value: Path) -> Path:
    """Callback of --out of verbs that upload what they write to an address.

    What is at an address is looked at when the work begins.

    Raises:
        HddmError: as `absent`, and as `hddm.utils.uploading.refuse_target`.
    """
    address = address_of(value)
    if address is None:
        return absent(context, value)
    from hddm.utils.uploading import refuse_target

    refuse_target(address, bool(context.params.get("overwrite")))
    return address


def absent(context: typer.Context, value: Path) -> Path:
    """Callback of --out: what is in the way is refused before anything is imported to fill it.

    With --overwrite or --resume, which are eager, what is there may be of the right kind; with --dry-run
    nothing is written there.

    Raises:
        HddmError: as `check_absent`.
    """
    refuse_address(value)
    if not any(context.params.get(name) for name in ("overwrite", "resume", "dry_run")):
        check_absent(value, EXPERT_FILE)
    return value


def refuse_other(out: Path, record: str, kind: str) -> None:
    """Refuse a folder with content but no file ``record``, which marks the ``kind`` that goes on there.

    An address is refused as well.
    """
    refuse_address(out)
    if out.is_dir() and not is_empty(out) and not (out / record).is_file():
        raise HddmError(f"{out} exists and holds no {kind}: choose another folder")


READERS = (existing, addressed, downloaded, named)
"""Callbacks of paths that are read."""
InputArgument = functools.partial(typer.Argument, callback=existing)
SourceArgument = functools.partial(typer.Argument, callback=addressed)
InputOption = functools.partial(typer.Option, callback=existing)
ModelArgument = functools.partial(typer.Argument, callback=downloaded)
NamedArgument = functools.partial(typer.Argument, callback=named)
ModelOption = functools.partial(typer.Option, callback=downloaded)

Out = Annotated[Path, typer.Option(help="Output folder; must not exist.", callback=absent)]
OutOrAddress = Annotated[
    Path,
    typer.Option(help="Output folder, or its address; must not exist.", callback=absent_or_address),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing --out.", is_eager=True)
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of all random numbers.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        is_eager=True,
        help="Measure what it will take in memory and time, print that, and write nothing.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Model = Annotated[Path, ModelArgument(help="Ensemble folder, expert folder or the Paris release.")]
AllowProgram = Annotated[
    bool,
    typer.Option(
        "--allow-program",
        help="Open experts whose networks are programs, as you would run their authors' code.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", is_eager=True, help="Resume an interrupted run with the same options."
    ),
]
Config = Annotated[
    Path | None, InputOption(help="YAML file of settings; options on the command line override it.")
]


class Without(NamedTuple):
    """Marks a record of which these fields are no options of a verb."""

    names: tuple[str, ...]


Made = TypeVar("Made", bound=Callable[..., None])
ALLOW_PROGRAM = "allow_program"


def opens_experts(verb: Made) -> Made:
    """Mark a verb that opens experts: it has the option --allow-program, and runs by its permission."""
    verb.opens_experts = True  # type: ignore[attr-defined]
    return verb


IN_FILES_ALONE = ("weight_decay", "max_grad_norm", "max_non_finite", "keep", "log_every")
"""Settings without an option."""
_SPELLED = {"prompts": "--prompt", "strategies": "--strategy"}
_CALLBACKS = {READ: existing, MODEL: downloaded}


def _option(name: str, field: Any) -> Any:
    """Annotation and default of the option of a record's field."""
    kind, extras, default = field.annotation, list(field.metadata), field.default
    is_optional = get_origin(kind) in (Union, types.UnionType)
    if is_optional:
        kind = next(one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        extras += more
    is_read_from_text = any(isinstance(one, BeforeValidator) for one in extras)
    spelled, arguments = name.replace("_", "-"), get_args(kind)
    names = [_SPELLED[name]] if name in _SPELLED else []
    if kind is bool and not names:
        has_opposite = is_optional or default is True
        names = [f"--{spelled}/--no-{spelled}" if has_opposite else f"--{spelled}"]
    elif get_origin(kind) is Literal:
        kind = Literal[tuple(map(str, arguments))]
    elif get_origin(kind) is dict or arguments[1:] == (...,):
        item = str if is_read_from_text else arguments[0]
        kind, default = types.GenericAlias(list, (item,)), None
    elif is_read_from_text:
        kind = str
    shown = next((one for one in extras if isinstance(one, Shown)), Shown())
    details = typer.Option(
        *names,
        help=as_typed(" ".join((field.description or "").split())),
        # What is in the way of --out depends on it.
        is_eager=name == "resume",
        metavar=shown.word,
        rich_help_panel=shown.topic,
        callback=next((_CALLBACKS[one] for one in extras if one in (READ, MODEL)), None),
    )
    if is_optional or field.is_required() or default is None:
        return Annotated[kind | None, details], None
    return Annotated[kind, details], default


def takes(command: Callable[..., None]) -> Callable[..., None]:
    """A verb as Typer reads it: with the fields of its records as options, and without the records."""
    named: list[inspect.Parameter] = []
    records: dict[str, type[Record]] = {}
    left_out: dict[str, set[str]] = {}
    for one in inspect.signature(command).parameters.values():
        kind, *marks = get_args(one.annotation) or (one.annotation,)
        if isinstance(kind, type) and issubclass(kind, Record):
            records[one.name] = kind
            left_out[one.name] = set().union(*(mark.names for mark in marks))
        else:
            named.append(one.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    has_permission = getattr(command, "opens_experts", False)
    if not (records or has_permission):
        return command
    options: dict[str, tuple[Any, Any]] = {}
    taken = {*IN_FILES_ALONE, *(one.name for one in named)}
    for key, record in records.items():
        for name, field in record.model_fields.items():
            if name not in taken and name not in left_out[key]:
                options[name] = _option(name, field)

    def taking(context: typer.Context, **values: Any) -> None:
        from hddm.networks.programs.permission import programs_allowed

        requested, own = {}, {}
        is_allowed = has_permission and values.pop(ALLOW_PROGRAM)
        for name, value in values.items():
            if is_given(context, name):
                requested[name] = value
            if name not in options:
                own[name] = value
        with programs_allowed(is_allowed):
            command(**own, **made_of(requested, own.get("config")))

    def made_of(requested: Mapping[str, Any], config: Path | None = None) -> dict[str, Record]:
        """The records of a verb, by its parameters."""
        made: dict[str, Record] = {}
        with errors_as(UsageError):
            for name, record in records.items():
                fields = record.model_fields
                own = {key: value for key, value in requested.items() if key in fields}
                made[name] = settings_of(record, config, own)
        return made

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("context", keyword, annotation=typer.Context), *named]
    if has_permission:
        one = inspect.Parameter(ALLOW_PROGRAM, keyword, default=False, annotation=AllowProgram)
        parameters.append(one)
    for name, (kind, default) in options.items():
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=kind))
    taking.__doc__, taking.__name__ = command.__doc__, command.__name__
    taking.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    taking.__annotations__ = {one.name: one.annotation for one in parameters}
    taking.made_of = made_of  # type: ignore[attr-defined]
    taking.check = getattr(command, "check", None)  # type: ignore[attr-defined]
    return taking


def checked_by(check: Callable[..., object]) -> Callable[[Made], Made]:
    """Mark a verb that calls ``check`` before it reads anything: a benchmark does so before any step runs.

    The parameters of ``check`` are some of the verb's own.
    """

    def mark(verb: Made) -> Made:
        verb.check = check  # type: ignore[attr-defined]
        return verb

    return mark


def is_given(context: typer.Context, name: str) -> bool:
    """True if the parameter ``name`` stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def add(
    group: typer.Typer, verb: Callable[..., None], name: str | None = None, hidden: bool = False
) -> None:
    """Add a verb to a group of commands, by default under the name of its function."""
    group.command(name or verb.__name__.replace("_", "-"), cls=Verb, hidden=hidden)(takes(verb))
