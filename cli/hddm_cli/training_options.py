"""Options that are the fields of a settings record, and a run file that may hold them too.

A verb takes them as ``**given`` and is decorated with the records that it wants; `GivenOptions` joins them
with the run file: the command line overrides the file, and the file overrides the defaults.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import typer

from hddm.training.settings import RunOptions, settings_of
from hddm.utils.errors import UsageError, asked
from hddm.utils.files import read_yaml
from hddm.utils.records import Record
from hddm_cli.options import InputOption, is_given

Settings = TypeVar("Settings", bound=Record)
Command = Callable[..., None]

IN_FILES_ALONE = ("weight_decay", "max_grad_norm", "max_non_finite", "keep", "log_every")
"""Settings without an option."""
_PANELS = {"batch_size": "Training", "guidance_scale": "Students of few steps"}
_CONFIG = Annotated[
    Path | None, InputOption(help="YAML file of settings; options on the command line override it.")
]


def _option(name: str, kind: Any, text: str) -> Any:
    """Return the annotation of the option of a field of this type, described by ``text``."""
    inner = [one for one in get_args(kind) if one is not type(None)]
    is_optional = get_origin(kind) in (Union, types.UnionType) and len(inner) == 1
    kind = inner[0] if is_optional else kind
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    names = []
    if kind is bool:
        flag = name.replace("_", "-")
        names = [f"--{flag}/--no-{flag}" if is_optional else f"--{flag}"]
    elif get_origin(kind) is Literal:
        kind = Literal[tuple(map(str, get_args(kind)))]
    elif get_origin(kind) is tuple:
        # As its own validator reads it.
        kind = str
    details = typer.Option(
        *names,
        help=" ".join(text.split()),
        # What is in the way of --out depends on it.
        is_eager=name == "resume",
        rich_help_panel=_PANELS.get(name),
    )
    return Annotated[kind | None if is_optional else kind, details]


def takes(*records: type[Record], without: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Give a verb the fields of ``records`` as options, and --config; it gets them as keywords."""

    def decorate(command: Command) -> Command:
        named = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        left_out = {*without, *IN_FILES_ALONE, *(p.name for p in named)}
        options: dict[str, tuple[Any, Any]] = {}
        for name, field in {n: f for record in records for n, f in record.model_fields.items()}.items():
            if name not in left_out:
                kind: Any = field.annotation
                default = None if field.is_required() else field.default
                kind = kind | None if field.is_required() else kind
                options[name] = _option(name, kind, field.description or ""), default
        options["config"] = _CONFIG, None
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in named]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in options.items()
        ]

        def taking(*args: Any, **kwargs: Any) -> None:
            command(*args, **kwargs)

        taking.__doc__, taking.__name__ = command.__doc__, command.__name__
        taking.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        taking.__annotations__ = {p.name: p.annotation for p in parameters}
        return taking

    return decorate


@dataclass(frozen=True)
class GivenOptions:
    """The options of a verb by name; of those, the ones on the command line override its run file."""

    context: typer.Context
    given: Mapping[str, Any]

    def settings(self, record: type[Settings], **own: Any) -> Settings:
        """Make settings of the kind ``record``, with ``own`` values that are no options.

        Raises:
            UsageError: for one that is neither given nor in the file, and has no default; for a file that
                cannot be read, an unknown key, or a value out of range.
        """
        chosen = {name: value for name, value in self.given.items() if is_given(self.context, name)}
        fields = {name: value for name, value in (chosen | own).items() if name in record.model_fields}
        with asked():
            return settings_of(record, self.given.get("config"), fields)

    def refuse_in_file(self, reason: str, *names: str) -> None:
        """Refuse a run file with one of ``names``; raises `UsageError` with ``reason``, naming the first."""
        file = self.given.get("config")
        with asked():
            found = read_yaml(file) if file else {}
        for name in names:
            if name in found:
                raise UsageError(f"--config {file}: {name}: {reason}; remove it")

    def run(self) -> RunOptions:
        """Return how the run is kept; raises as `settings`, and for a run that is in the way."""
        from hddm.training.resume import refuse_run

        options = self.settings(RunOptions)
        if not (options.resume or self.context.params["overwrite"]):
            refuse_run(self.context.params["out"])
        return options
