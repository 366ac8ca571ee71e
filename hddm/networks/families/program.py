"""Networks that are programs (`hddm.networks.programs`), of any class that `hddm.export` recorded."""

from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Generator, Tensor

from hddm.condition_names import LABELS, TEXT, TEXT_MASK
from hddm.networks.families.family import Config, Family, Taken, Tensors, count
from hddm.networks.programs.archive import PROGRAM
from hddm.networks.programs.network import ProgramFile, ProgramNetwork
from hddm.networks.programs.permission import refuse_program
from hddm.utils.errors import HddmError


class Program(Family):
    """A network whose config says what it takes, and whose program is in a file of its own."""

    name = ProgramNetwork.__name__
    # Its modules hold tensors that are in its file.
    depths: tuple[tuple[str, ...], ...] = ()
    multiplied: tuple[str, ...] = ()
    lora_layers = r"(?!)"

    @property
    def network(self) -> type[ModelMixin]:
        kind: type[ModelMixin] = ProgramNetwork
        return kind

    def parts_in(self, folder: Path) -> dict[str, Any]:
        path = folder / PROGRAM
        refuse_program(path)
        return {"file": ProgramFile.read(path)}

    def write_parts(self, network: ModelMixin, folder: Path) -> None:
        assert isinstance(network, ProgramNetwork)
        (folder / PROGRAM).write_bytes(network.file.content)

    def patch(self, config: Config) -> int | None:
        return None

    def conditions(self, config: Config) -> Taken:
        return Taken(
            tuple(config.get("conditions") or ()),
            count(config, "num_classes"),
            count(config, "null_class"),
        )

    def text_width(self, config: Config) -> int | None:
        shape = (config.get("conditions") or {}).get(TEXT)
        return int(shape[-1]) if shape else None

    def call(self, model: ModelMixin, x: Tensor, timestep: Tensor, conditions: Tensors) -> Tensor:
        given = dict(conditions)
        shape = (model.config.get("conditions") or {}).get(TEXT_MASK)
        if shape is not None and TEXT_MASK not in given:
            # Other networks can do without it; all tokens count then.
            given[TEXT_MASK] = torch.ones(len(x), *shape, device=x.device)
        output: Tensor = model(x, timestep, **given)
        return output

    def compared_size(self, config: Config, size: tuple[int, int]) -> tuple[int, int]:
        # A program takes the size that it was recorded with.
        return size

    def example(
        self, name: str, config: Config, num_classes: int | None, noise: Generator
    ) -> Tensor:
        if name == LABELS:
            return super().example(name, config, num_classes, noise)
        shape = (config.get("conditions") or {}).get(name)
        if shape is None:
            raise HddmError(f"has no condition {name}")
        return torch.randn(1, *shape, generator=noise)


PROGRAMS = Program()
