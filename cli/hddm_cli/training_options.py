"""Options that verbs which train share: of the loop, of keeping a run, and a run file.

A verb takes them as ``**given`` and is decorated with the groups that it wants; `GivenOptions` joins them
with the run file: what stands on the command line counts, else what the file says, else the default.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from hddm.utils.errors import UsageError, asked
from hddm_cli.options import BatchSize, Device, InputOption, LearningRate, Precision, Seed, is_given

if TYPE_CHECKING:
    from hddm.training.settings import RunOptions
    from hddm.utils.records import Record

    Settings = TypeVar("Settings", bound=Record)

Command = Callable[..., None]
Group = Mapping[str, tuple[Any, Any]]

LOOP: Group = {
    "batch_size": (BatchSize, 128),
    "optimizer": (
        Annotated[
            Literal["adamw", "muon"] | None,
            typer.Option(
                help="Optimizer for weight matrices; AdamW trains the rest. Default: muon; adamw with --init."
            ),
        ],
        None,
    ),
    "learning_rate": (LearningRate, None),
    "muon_learning_rate": (
        Annotated[
            float | None, typer.Option(help="Learning rate of the matrices that Muon trains. Default: 0.02.")
        ],
        None,
    ),
    "warmup": (
        Annotated[
            int | None,
            typer.Option(min=0, help="Steps of warm-up. Default: a tenth of --steps, at most 100."),
        ],
        None,
    ),
    "seed": (Seed, 0),
    "ema_decay": (Annotated[float, typer.Option(help="Decay of the weights' moving average.")], 0.999),
    "mixed_precision": (Precision, "no"),
    "gradient_accumulation_steps": (
        Annotated[int, typer.Option(min=1, help="Parts that each batch is split into to save memory.")],
        1,
    ),
    "gradient_checkpointing": (
        Annotated[
            bool,
            typer.Option(
                "--gradient-checkpointing",
                help="Recompute activations in the backward pass to save memory.",
            ),
        ],
        False,
    ),
    "compile": (
        Annotated[bool, typer.Option("--compile", help="Compile the network with torch.compile.")],
        False,
    ),
    "fsdp": (
        Annotated[bool, typer.Option("--fsdp", help="Split the weights over the processes of accelerate.")],
        False,
    ),
    "device": (Device, "auto"),
    "threads": (
        Annotated[
            int | None, typer.Option(min=1, help="CPU threads; they affect rounding. Default: PyTorch's.")
        ],
        None,
    ),
}
KEEPING: Group = {
    "resume": (
        Annotated[bool, typer.Option("--resume", is_eager=True, help="Resume the run in OUT.run.")],
        False,
    ),
    "allow_config_change": (
        Annotated[bool, typer.Option("--allow-config-change", help="Resume even if settings have changed.")],
        False,
    ),
    "checkpoint_every": (
        Annotated[
            int, typer.Option(min=1, help="Steps between checkpoints; one is also saved every two minutes.")
        ],
        500,
    ),
    "wandb": (
        Annotated[
            str | None, typer.Option(metavar="PROJECT", help="Weights & Biases project to log to as well.")
        ],
        None,
    ),
}
PICTURES: Group = {
    "sample_every": (Annotated[int, typer.Option(min=0, help="Steps between sample grids; 0 for none.")], 0)
}
FILE: Group = {
    "config": (
        Annotated[
            Path | None, InputOption(help="YAML file of settings; options on the command line override it.")
        ],
        None,
    )
}


def takes(*groups: Group) -> Callable[[Command], Command]:
    """Give a verb the options in ``groups``, which it gets as keywords."""

    def decorate(command: Command) -> Command:
        named = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for group in groups
            for name, (annotation, default) in group.items()
        ]

        def taking(*args: Any, **kwargs: Any) -> None:
            command(*args, **kwargs)

        taking.__doc__, taking.__name__ = command.__doc__, command.__name__
        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in named]
        taking.__signature__ = inspect.Signature([*keyword, *options])  # type: ignore[attr-defined]
        taking.__annotations__ = {p.name: p.annotation for p in [*keyword, *options]}
        return taking

    return decorate


@dataclass(frozen=True)
class GivenOptions:
    """The options of a verb, and which of them stand on the command line.

    ``given`` holds options by the names of the settings that they are.
    """

    context: typer.Context
    given: Mapping[str, Any]

    def settings(self, record: "type[Settings]") -> "Settings":
        """Settings of the kind ``record``.

        Raises:
            UsageError: for one that is neither given nor in the file, and has no default; for a file that
                cannot be read, an unknown key, or a value out of range.
        """
        from hddm.training.settings import read_run_file, settings_of

        file = self.given.get("config")
        named = {name: value for name, value in self.given.items() if name in record.model_fields}
        required = {name for name, one in record.model_fields.items() if one.is_required()}
        for name in required & set(named):
            if named[name] is None:
                del named[name]
        with asked():
            known = set(named) | (set(read_run_file(file, record)) if file else set())
            for name in sorted(required - known):
                raise UsageError(f"--{name} is required, here or in --config")
            return settings_of(record, file, named, {name for name in named if is_given(self.context, name)})

    def refuse_in_file(self, reason: str, *names: str) -> None:
        """Refuse a run file with one of ``names``; raises `UsageError` with ``reason``, naming the first."""
        from hddm.utils.files import read_yaml

        file = self.given.get("config")
        with asked():
            found = set(read_yaml(file)) if file else set()
        for name in names:
            if name in found:
                raise UsageError(f"--config {file}: {name}: {reason}; remove it")

    def run(self) -> "RunOptions":
        """Options of keeping the run; raises as `settings`, and for a run that is in the way."""
        from hddm.training.resume import refuse_run
        from hddm.training.settings import RunOptions

        options = self.settings(RunOptions)
        if not (options.resume or self.context.params["overwrite"]):
            refuse_run(self.context.params["out"])
        return options
