"""The network of a program: a module whose parameters are the program's weights, and which runs its graph."""

import contextlib
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

from hddm.networks.programs.archive import graph_text, read_archive
from hddm.networks.programs.graph import HERE, Graph, Ref, Weight, parse_graph
from hddm.networks.programs.operators import Operator, operator_of
from hddm.utils.errors import HddmError, one_line

LARGEST_VALUE = 2**32
"""Elements of a value of one sample, with which a graph is tried before it takes any memory."""
_TRIED_BATCH = 3
_HALF = (torch.float16, torch.bfloat16)
_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


@dataclass(frozen=True)
class ProgramFile:
    """A program: the bytes of its file, to be written again, and its graph."""

    content: bytes
    graph: Graph

    @classmethod
    def of(cls, content: bytes) -> "ProgramFile":
        """Check and parse the bytes of a file; `HddmError` as `graph_text` and `parse_graph`."""
        return cls(content, parse_graph(graph_text(content)))

    @classmethod
    def read(cls, path: Path) -> "ProgramFile":
        """Check and parse a file; raises as `of`, with the file and a remedy."""
        content = read_archive(path)
        try:
            return cls.of(content)
        except HddmError as error:
            raise HddmError(
                f"{path}: is no program that hddm runs: {error.message}; get it again from its author, who "
                "makes it by hddm.export"
            ) from error

    @functools.cached_property
    def sha256(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.content).hexdigest()

    def __deepcopy__(self, memo: object) -> "ProgramFile":
        return self


class ProgramNetwork(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """A network made of operators, as `hddm.export` records them from any other network.

    A program is recorded in float32, in evaluation mode: dropout is left out, and batch norms use their
    averages, in training too. In half precision its weights take half the memory, and it runs under
    `torch.autocast`; in float64 all its floating numbers are in float64.

    Args:
        file: the program, whose graph it computes; no part of its config.
        program: SHA-256 of the file that the graph is in.
        sample_size: height and width of a sample.
        in_channels: channels of a sample.
        out_channels: channels of the output: the same, or twice as many with a learned variance.
        conditions: shapes of conditions, without batch, by name.
        num_classes: number of classes, where it takes any.
        null_class: the class that stands for none.

    Raises:
        HddmError: for a graph that does not compute such an output of such inputs.
    """

    ignore_for_config = ["file"]  # noqa: RUF012 - as in its base

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        file: ProgramFile,
        program: str,
        sample_size: tuple[int, int],
        in_channels: int,
        out_channels: int,
        conditions: Mapping[str, Sequence[int]] | None = None,
        num_classes: int | None = None,
        null_class: int | None = None,
    ) -> None:
        super().__init__()
        if program != file.sha256:
            raise HddmError("its config is that of another program")
        self.file = file
        self._graph = graph = file.graph
        for weight in graph.weights.values():
            _register(self, weight)
        shape = (in_channels, *sample_size)
        stated = {name: tuple(own) for name, own in (conditions or {}).items()}
        _check_inputs(graph, shape, stated)
        self._try((out_channels, *sample_size))

    def forward(self, x: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        """Output (batch, out_channels, H, W) for states ``x`` (batch, C, H, W) and times (batch,)."""
        given = {"x": x, "timestep": timestep, **conditions}
        unknown = sorted(given.keys() - self._graph.inputs.keys())
        missing = sorted(self._graph.inputs.keys() - given.keys())
        if unknown or missing:
            raise HddmError(
                f"a program with the inputs {', '.join(self._graph.inputs)} was called with "
                f"{', '.join(given)}"
            )
        own = self.dtype
        with contextlib.ExitStack() as stack:
            device = x.device.type
            if own in _HALF and not torch.is_autocast_enabled(device) and device != "meta":
                stack.enter_context(torch.autocast(device, dtype=own))
            return self._run(given, own == torch.float64).to(x.dtype)

    def _run(self, given: Mapping[str, Tensor], is_wide: bool, most: int | None = None) -> Tensor:
        """The output for inputs by name; with ``is_wide``, float32 stands for float64.

        Raises `HddmError` for a value of more than ``most`` elements.
        """
        device = given["x"].device
        values = dict[str, Any]()
        for name, kind in self._graph.inputs.items():
            values[name] = given[name].to(device, _widened(kind.dtype, is_wide))
        for step in self._graph.steps:
            arguments = {}
            for name, argument in step.arguments.items():
                arguments[name] = self._resolved(argument, values, device, is_wide)
            found = operator_of(step.target)
            assert found is not None
            results = _called(found, arguments)
            if isinstance(step.results, str):
                values[step.results] = results
            else:
                values.update(zip(step.results, results, strict=True))
            if most is not None:
                _refuse_larger(results, most, step.target)
            for name in step.done:
                values.pop(name, None)
        output: Tensor = values[self._graph.output]
        return output

    def _resolved(
        self, argument: Any, values: Mapping[str, Any], device: torch.device, is_wide: bool
    ) -> Any:
        """An argument with values in place of their names."""
        if isinstance(argument, Ref):
            if argument.name in values:
                return values[argument.name]
            weight = self._graph.weights[argument.name]
            return self._weight(weight).to(_widened(weight.kind.dtype, is_wide))
        if isinstance(argument, tuple):
            return [self._resolved(one, values, device, is_wide) for one in argument]
        if argument is HERE:
            return device
        if isinstance(argument, torch.dtype):
            return _widened(argument, is_wide)
        return argument

    def _weight(self, weight: Weight) -> Tensor:
        owner, _, leaf = weight.name.rpartition(".")
        found: Tensor = getattr(self.get_submodule(owner), leaf)
        return found

    @torch.no_grad()
    def _try(self, shape: tuple[int, ...]) -> None:
        """Run the graph on shapes alone, and refuse one whose output has another shape than this."""
        tried = {}
        for name, kind in self._graph.inputs.items():
            tried[name] = torch.empty(_TRIED_BATCH, *kind.shape, dtype=kind.dtype, device="meta")
        try:
            output = self._run(tried, False, LARGEST_VALUE * _TRIED_BATCH)
        except HddmError:
            raise
        except Exception as error:  # operators raise anything for arguments that do not fit
            raise HddmError(f"the program does not run ({one_line(error, 120)})") from error
        wanted = (_TRIED_BATCH, *shape)
        if output.shape != wanted or not output.is_floating_point():
            raise HddmError(
                f"the program gives {tuple(output.shape)} in {output.dtype} for {_TRIED_BATCH} samples, and "
                f"an expert's output is {wanted}"
            )


def _called(found: Operator, arguments: Mapping[str, Any]) -> Any:
    # Arithmetic of sizes is Python's, which takes its arguments by place.
    if found.is_of_sizes:
        return found.function(*arguments.values())
    return found.function(**arguments)


def _refuse_larger(results: Any, most: int, target: str) -> None:
    listed = results if isinstance(results, list | tuple) else [results]
    for one in listed:
        if isinstance(one, Tensor) and one.numel() > most:
            shape = tuple(one.shape)
            raise HddmError(f"the program makes a value {shape} by {target}, which is too large")


def _widened(dtype: torch.dtype, is_wide: bool) -> torch.dtype:
    return _WIDER.get(dtype, dtype) if is_wide else dtype


def _register(network: nn.Module, weight: Weight) -> None:
    """Make a weight a parameter or buffer under its name, without memory."""
    *owners, leaf = weight.name.split(".")
    module = network
    for name in owners:
        inner = module._modules.get(name)
        if inner is None:
            if hasattr(module, name):
                raise HddmError(f"a weight of the program is called {weight.name!r}; rename it")
            inner = nn.Module()
            module.add_module(name, inner)
        module = inner
    empty = torch.empty(weight.kind.shape, dtype=weight.kind.dtype, device="meta")
    if hasattr(module, leaf):
        raise HddmError(f"a weight of the program is called {weight.name!r}; rename it")
    # Gradients exist for floating numbers alone.
    if weight.is_parameter and empty.is_floating_point():
        module.register_parameter(leaf, nn.Parameter(empty))
    else:
        module.register_buffer(leaf, empty)


def _check_inputs(
    graph: Graph, shape: tuple[int, ...], conditions: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise an `HddmError` unless the program has the inputs that its config states."""
    stated = {"x": shape, "timestep": (), **conditions}
    found = {name: kind.shape for name, kind in graph.inputs.items()}
    if stated != found:
        raise HddmError(f"the program takes {found}, and its config says {stated}")
