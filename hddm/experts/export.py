"""Experts of networks whose classes nobody else has: `export` records the network as a program.

The folder is that of any other expert, with the program beside its config and weights
(`hddm.networks.programs`).
"""

import copy
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from hddm.condition_names import LABELS
from hddm.experts.expert import Expert
from hddm.experts.expert_folders import as_field, open_expert, save_expert
from hddm.experts.records import EXPERT_FILE, ExpertRecord, SourceRecord
from hddm.networks.families import family_of
from hddm.networks.families.family import Taken
from hddm.networks.families.program import PROGRAMS
from hddm.networks.programs.archive import PROGRAM
from hddm.networks.programs.graph import Graph, references
from hddm.networks.programs.network import ProgramFile
from hddm.networks.programs.permission import programs_allowed
from hddm.networks.programs.tracing import traced, weights_of, write_program
from hddm.networks.wrappers import NetworkWrapper
from hddm.predictions import PredictionType
from hddm.schedules import LinearSchedule, Schedule, from_diffusers
from hddm.units import Units
from hddm.utils.errors import HddmError, UsageError, an, errors_as, one_line
from hddm.utils.files import check_absent, new_folder
from hddm.utils.streams import Use, generator
from hddm.utils.tensors import refuse_non_finite

LARGEST_DIFFERENCE = 1e-4
"""Between outputs of the network and of its program, as a share of the largest output."""
_BATCHES = (2, 1, 3, 8)
"""Sizes of batches; the program is recorded with the first, and compared at all."""
_PICTURES = (1, 3)
"""Channels of pixels."""
_LIKE_VIEWS = (
    "slice",
    "view",
    "reshape",
    "squeeze",
    "unsqueeze",
    "_to_copy",
    "to",
    "clone",
    "alias",
)


def export(
    network: nn.Module,
    folder: str | Path,
    *,
    schedule: Schedule | Mapping[str, Any] | str | Path,
    prediction_type: str,
    sample_shape: Sequence[int],
    conditions: Mapping[str, Tensor] | None = None,
    time_scale: float = 1.0,
    data_scale: float = 1.0,
    data_shift: float | Tensor = 0.0,
    null_conditions: Mapping[str, Tensor] | None = None,
    classes: Sequence[str] = (),
    latent_scale: float | None = None,
    licence: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a network of any class into an expert folder, as a program that others run without its class.

    The program is recorded by `torch.export`, in float32 and in evaluation mode: dropout is left out, and
    batch norms use their averages. It is compared with the network at several batch sizes before the folder
    is there. Opening it needs ``allow_program=True``, or ``--allow-program`` on the command line.

    Args:
        network: ``network(x, timestep, **conditions)`` to a tensor, as for `hddm.VelocityField`; or a network
            of diffusers that hddm knows. It is left as it is.
        folder: to write; it must not exist.
        schedule: the one that it was trained on, or a scheduler of diffusers, its config or file.
        prediction_type: what it predicts, a `hddm.velocity.PredictionType` or its name.
        sample_shape: shape (C, H, W) of a sample: pixels for 1 or 3 channels, else latents.
        conditions: an example of each condition by name, without batch, which fixes its shape.
        time_scale: the network is fed native time × ``time_scale``.
        data_scale: the network's own data are ``data_scale`` * x_0 + ``data_shift``.
        data_shift: a number, or a tensor (C, 1, 1).
        null_conditions: the value of each condition that stands for none, without batch.
        classes: names of its classes, one per label that it takes; by default their numbers.
        latent_scale: latents are those of the VAE times this; None if that is not known.
        licence: of its weights.
        overwrite: replace an expert folder that is there.

    Returns:
        The folder.

    Raises:
        HddmError: leaving nothing behind, where torch cannot record the network, or it fixes the batch size,
            uses an operator outside the closed list, or differs from its program; for a schedule that does
            not fit the prediction type, and as `hddm.VelocityField`.
    """
    target, shape = Path(folder), _shape(sample_shape)
    check_absent(target, EXPERT_FILE, overwrite)
    if not isinstance(network, nn.Module):
        raise UsageError(f"`network`: must be a torch.nn.Module, not {an(type(network).__name__)}")
    path = schedule if isinstance(schedule, Schedule) else from_diffusers(schedule)
    # A config is written in alphabetical order.
    examples = {name: value.detach().cpu() for name, value in sorted((conditions or {}).items())}
    nulls = {name: value.detach().cpu() for name, value in (null_conditions or {}).items()}
    own = _recorded(network)
    inputs = _example_inputs(path, time_scale, shape, examples)
    name = an(type(network).__name__)
    with errors_as(HddmError, f"{name} cannot be exported"):
        program = traced(own, _rows(inputs, _BATCHES[0]))
        channels = _channels(own, inputs)
    with new_folder(target, EXPERT_FILE, overwrite) as draft:
        write_program(draft / PROGRAM, program)
        with errors_as(HddmError, f"{name} cannot be exported"):
            file = ProgramFile.of((draft / PROGRAM).read_bytes())
        (draft / PROGRAM).unlink()
        weights = weights_of(program, file.graph)
        taken = _taken(network, file.graph, examples, nulls, classes)
        made = PROGRAMS.network(
            file=file,
            program=file.sha256,
            sample_size=shape[1:],
            in_channels=shape[0],
            out_channels=channels,
            conditions={name: list(value.shape) for name, value in examples.items()},
            num_classes=taken.num_classes,
            null_class=taken.null_class,
        )
        made.load_state_dict({name: one.detach() for name, one in weights.items()}, assign=True)
        refuse_non_finite(target, weights)
        units = Units(data_scale, data_shift)
        is_flow = isinstance(path, LinearSchedule)
        record = ExpertRecord(
            objective="flow" if is_flow else "ddpm",
            prediction_type=PredictionType.parse(prediction_type),
            schedule=path.config,
            schedule_source="as passed to hddm.export",
            time_scale=time_scale,
            sample_shape=shape,
            data_scale=units.scale,
            data_shift=units.shifts,
            space="pixels" if shape[0] in _PICTURES else "latents",
            latent_scale=1.0 if shape[0] in _PICTURES else latent_scale,
            variance_head=made.config.out_channels != shape[0],
            conditions=tuple(examples),
            classes=tuple(classes) or tuple(map(str, range(taken.num_classes or 0))),
            null_class=taken.null_class,
            weights="unstated",
            source=SourceRecord(
                layout="program",
                files={},
                options={"network": type(network).__name__, "torch": torch.__version__},
                hddm=version("hddm-diffusion"),
            ),
            licence=licence,
        )
        without_labels = {name: one for name, one in nulls.items() if name != LABELS}
        expert = Expert(made, record, nulls=without_labels)
        as_field(expert, made)
        save_expert(draft, expert)
        _compare(own, draft, inputs)
    return target


def _shape(sample_shape: Sequence[int]) -> tuple[int, int, int]:
    sides = tuple(sample_shape)
    if len(sides) != 3 or not all(isinstance(one, int) and one > 0 for one in sides):
        raise UsageError(f"`sample_shape` {one_line(sides, 60)}: must be (C, H, W), as (3, 32, 32)")
    return sides


def _recorded(network: nn.Module) -> nn.Module:
    """A copy of the network as experts call it, in float32 on the CPU, in evaluation mode."""
    own = copy.deepcopy(network).float().cpu().eval()
    family = family_of(own)
    if family is None or isinstance(own, NetworkWrapper):
        return own
    assert isinstance(own, ModelMixin)
    return NetworkWrapper(own)


def _example_inputs(
    path: Schedule, time_scale: float, shape: tuple[int, ...], conditions: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """States, times and conditions of as many samples as are compared at once."""
    most = max(_BATCHES)
    noise = generator(0, Use.CONVERSION_CONDITIONS)
    t = torch.linspace(0.1, 0.9, most, dtype=torch.float64)
    found = {
        "x": torch.randn(most, *shape, generator=noise),
        "timestep": (path.match(t) * time_scale).float(),
    }
    for name, value in conditions.items():
        rows = value[None].expand(most, *value.shape).clone()
        if value.is_floating_point():
            rows[1:] += 0.1 * torch.randn(rows[1:].shape, generator=noise).to(rows)
        found[name] = rows
    return found


def _rows(inputs: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    return {name: value[:number] for name, value in inputs.items()}


def _channels(own: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    with torch.no_grad():
        output: Tensor = own(**_rows(inputs, _BATCHES[0]))
    wanted = inputs["x"][: _BATCHES[0]].shape
    channels = output.shape[1] if output.ndim == len(wanted) else 0
    has_sides = output.shape[2:] == wanted[2:] and channels in (wanted[1], 2 * wanted[1])
    if not has_sides or len(output) != _BATCHES[0]:
        raise HddmError(
            f"the network gives {tuple(output.shape)} for states {tuple(wanted)}; it must give their shape, "
            "or twice as many channels with a learned variance"
        )
    return channels


def _taken(
    network: nn.Module,
    graph: Graph,
    conditions: Mapping[str, Tensor],
    nulls: Mapping[str, Tensor],
    classes: Sequence[str],
) -> Taken:
    """The conditions, with the number of classes: by names, by the network's family or by its embedding."""
    for name in nulls:
        if name not in conditions:
            raise UsageError(f"`null_conditions`: {name} is none of `conditions`")
    names = tuple(conditions)
    if LABELS not in conditions:
        if classes:
            raise UsageError(f"`classes`: the network takes no {LABELS}; name it in `conditions`")
        return Taken(names)
    family = family_of(network)
    if family is not None and isinstance(network, ModelMixin):
        known = family.conditions(network.config)
        return Taken(names, known.num_classes, known.null_class)
    null = int(nulls[LABELS]) if LABELS in nulls else None
    number = len(classes) or _embedded(graph)
    if number is None:
        raise UsageError(
            f"`classes`: the network embeds {LABELS} in a way of its own, so that their number is not known; "
            "name the classes"
        )
    if null is not None and not classes and null == number - 1:
        number = null
    return Taken(names, number, null)


def _embedded(graph: Graph) -> int | None:
    """Number of rows of the table that class labels are looked up in; None where there is none."""
    labels = {LABELS}
    for step in graph.steps:
        name = step.target.removeprefix("torch.ops.aten.").partition(".")[0]
        if name == "embedding" and step.arguments["indices"].name in labels:
            weight = graph.weights.get(step.arguments["weight"].name)
            return None if weight is None else weight.kind.shape[0]
        if name in _LIKE_VIEWS and labels & set(references(step.arguments.values())):
            labels.add(str(step.results))
    return None


def _compare(own: nn.Module, folder: Path, inputs: Mapping[str, Tensor]) -> None:
    """Raise an `HddmError` where the program in ``folder`` differs from the network that it is of."""
    with programs_allowed(True):
        written = open_expert(folder).read().network
    name = an(type(own.model if isinstance(own, NetworkWrapper) else own).__name__)
    for number in _BATCHES:
        given = _rows(inputs, number)
        with torch.no_grad():
            expected = own(**given)
        try:
            with torch.no_grad():
                found = written(**given)
        except RuntimeError as error:
            raise HddmError(
                f"{name} cannot be exported: its program does not run for {number} samples "
                f"({one_line(error, 120)})"
            ) from error
        difference = (found - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
        if not difference <= LARGEST_DIFFERENCE:
            raise HddmError(
                f"{name} cannot be exported: for {number} samples its program differs by {difference:.1e} of "
                "its output; it may depend on the values or the number of its inputs, or on chance"
            )
