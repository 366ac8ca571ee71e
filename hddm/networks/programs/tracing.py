"""Programs of networks: what `torch.export` records of a network, written as a ``.pt2`` file.

The file holds no weights, but zeros in their place: the weights are in the expert's weights file alone, so
that there is one set of them. Nor does it hold what torch adds of the author's machine: paths, lines of code
and examples.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from hddm.networks.programs.graph import Graph
from hddm.networks.wrappers import NetworkWrapper
from hddm.utils.errors import HddmError, an, one_line

_OF_AUTHOR = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")


def traced(network: nn.Module, inputs: Mapping[str, Tensor]) -> ExportedProgram:
    """What torch records of ``network(x, timestep, **conditions)``, with a free batch.

    Raises `HddmError` with torch's cause where it cannot record that, or the network fixes the batch.
    """
    given = dict(inputs)
    x, timestep = given.pop("x"), given.pop("timestep")
    free = {0: Dim.DYNAMIC}
    shapes: dict[str, Any] = {"x": free, "timestep": free}
    if given:
        shapes["conditions"] = dict.fromkeys(given, free)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                _Called(network), (x, timestep), given, dynamic_shapes=shapes
            )
            # Code that torch would run before the program, to check the sizes of inputs.
            program._guards_code = []
            # Without dropout, and without operators that change their input.
            plain: ExportedProgram = program.run_decompositions({})
            return plain
    except Exception as error:  # torch has many kinds of errors, and the network its own
        raise HddmError(_cause(error)) from error


def _cause(error: Exception) -> str:
    """The first line of torch's error that says anything."""
    if isinstance(error, HddmError):
        return error.message
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    is_of_batch = "constraint" in str(error).lower() and "specializ" in str(error).lower()
    words = f"{type(error).__name__}: {one_line(first.replace('`', chr(39)), 300)}"
    return f"it fixes the batch size ({words})" if is_of_batch else words


class _Called(nn.Module):
    """A network under the names of inputs that experts have, and under its own names of weights."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        named = network.model if isinstance(network, NetworkWrapper) else network
        # In a list, it is no part of the module, whose parts are its own.
        self._network = [network]
        self._modules, self._parameters, self._buffers = (
            named._modules,
            named._parameters,
            named._buffers,
        )
        self._non_persistent_buffers_set = named._non_persistent_buffers_set
        self.training = False

    def forward(self, x: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        output = self._network[0](x, timestep, **conditions)
        if not isinstance(output, Tensor):
            kind = an(type(output).__name__)
            raise HddmError(
                f"network(x, timestep, **conditions) gives {kind}, and must give a tensor"
            )
        return output


def weights_of(program: ExportedProgram, graph: Graph) -> dict[str, Tensor]:
    """The tensors that a program takes, by their names in ``graph``."""
    found = {}
    for weight in graph.weights.values():
        held = program.state_dict.get(weight.name)
        found[weight.name] = program.constants[weight.name] if held is None else held
    return found


def write_program(path: Path, program: ExportedProgram) -> None:
    """Write a program into a new file, as `torch.export.save` does, with zeros in place of its weights."""
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", program.graph).nodes:
            for key in _OF_AUTHOR:
                node.meta.pop(key, None)
    held, examples = program.state_dict, program.example_inputs
    program._state_dict = {name: _zeros(one) for name, one in held.items()}
    program._example_inputs = None
    try:
        with warnings.catch_warnings():
            # A zero that stands for many is no complete tensor, says torch.
            warnings.simplefilter("ignore")
            torch.export.save(program, path)
    finally:
        program._state_dict, program._example_inputs = held, examples


def _zeros(one: Tensor) -> Tensor:
    """As many zeros, in the memory of one."""
    zeros = torch.zeros((), dtype=one.dtype).expand(one.shape)
    if isinstance(one, nn.Parameter):
        return nn.Parameter(zeros, requires_grad=one.is_floating_point())
    return zeros
