"""What is said of one model of a benchmark; see `hddm.benchmark.schema`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from hddm.benchmark.slugs import ENSEMBLES, FINISHED, SAMPLES, slug
from hddm.training.island_jobs import parse_objectives
from hddm.utils.errors import HddmError
from hddm.utils.records import Record

BY_ERROR = "by-error"
RATIO = re.compile(rf"(\d+):(\d+)(?: {BY_ERROR})?")


def _leaves_seed_and_objective(values: dict[str, Any]) -> dict[str, Any]:
    for key in ("seed", "objective"):
        if key in values:
            raise ValueError(f"{key} is said by the benchmark; remove it")
    return values


TrainingKeys = Annotated[dict[str, Any], AfterValidator(_leaves_seed_and_objective)]
"""Keys of `hddm.training.settings`, without those that differ within one benchmark."""


class ModelSettings(Record):
    """One model of the comparison."""

    name: str
    kind: Literal["single", "ensemble", "finished"] = "ensemble"
    """One network on all images; an expert a shard and a router; or what ``path`` holds."""
    objectives: str = "flow"
    """``flow`` or ``ddpm``; of an ensemble also ``1:3`` (DDPM on the first shard, flow on three),
    ``0=ddpm,*=flow``, ``by-error`` (on each shard the objective whose expert has the lower velocity error on
    validation images), or ``1:3 by-error`` (DDPM on the shard where that loses least)."""
    converted: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Flow experts are DDPM experts for this share of their steps, and are then trained on through the exact
    conversion."""
    blended: Annotated[float, Field(gt=0, lt=1)] | None = None
    """On each shard a DDPM expert for this share of the steps and a flow expert for the rest; at each noise
    level the one runs whose velocity error on validation images is lower there."""
    init: Path | None = None
    """An expert folder that flow experts are trained on from; its own compute is not counted."""
    path: Path | None = None
    """Of a finished model: an expert or ensemble folder that makes images in pixels."""
    training: TrainingKeys = Field(default_factory=dict)
    """Before what `TrainingSettings` says, for this model's experts."""

    @field_validator("objectives", mode="before")
    @classmethod
    def _is_a_word(cls, value: object) -> object:
        # YAML reads a bare 1:3 as a number of minutes.
        if isinstance(value, int):
            raise ValueError('write it in quotes, as "1:3"')
        return value

    def named_objectives(self, shards: int) -> list[str]:
        """The objective of each shard; of those that errors choose, what DDPM on the first shards would be.

        Raises:
            HddmError: for objectives that are not of ``shards`` experts, or unknown.
        """
        if self.objectives == BY_ERROR:
            return ["flow"] * shards
        ratio = RATIO.fullmatch(self.objectives)
        if ratio is None:
            return parse_objectives(self.objectives, shards, f"{self.name}: objectives")
        ddpm, flow = int(ratio[1]), int(ratio[2])
        if ddpm + flow != shards:
            raise HddmError(
                f"{self.name}: objectives {self.objectives!r} are of {ddpm + flow} experts, and "
                f"partition.shards is {shards}"
            )
        return ["ddpm"] * ddpm + ["flow"] * flow

    def refuse_unused_start(self, shards: int) -> None:
        """Refuse other experts to start from where none of ``shards`` experts is flow.

        Raises:
            HddmError: for that, and as `named_objectives`.
        """
        key = "converted" if self.converted is not None else "init"
        if getattr(self, key) is not None and "flow" not in self.named_objectives(shards):
            raise HddmError(
                f"{self.name}: {key} is for flow experts, and objectives {self.objectives!r} have none; drop "
                "one"
            )

    @property
    def chooses(self) -> bool:
        """Whether errors on validation images choose among experts of both objectives on each shard."""
        return BY_ERROR in self.objectives or self.blended is not None

    @model_validator(mode="after")
    def _says_what_it_is(self) -> "ModelSettings":
        if (self.kind == "finished") != (self.path is not None):
            raise ValueError(f"{self.name}: path and kind: finished go together")
        # Settings written out in full say flow of every model, so that it passes.
        if self.kind == "finished" and (self.training or self.objectives != "flow"):
            raise ValueError(
                f"{self.name}: is finished, so training and objectives have nothing to say; drop them"
            )
        if self.converted is not None and self.init is not None:
            raise ValueError(f"{self.name}: starts from converted experts or from init; drop one")
        if self.blended is not None:
            if self.kind != "ensemble" or self.objectives != "flow":
                raise ValueError(f"{self.name}: blended is an ensemble of both; drop kind and objectives")
            if self.converted is not None or self.init is not None:
                raise ValueError(f"{self.name}: is blended, or starts from other experts; drop one")
        if self.kind != "ensemble" and (self.converted is not None or self.init is not None):
            raise ValueError(f"{self.name}: converted and init are for ensembles; drop them, or drop kind")
        if self.kind == "single" and self.objectives not in ("flow", "ddpm"):
            raise ValueError(f"{self.name}: a single model has one objective, flow or ddpm")
        return self


def refuse_shared_folders(models: Sequence[ModelSettings]) -> None:
    """Refuse names that give a model no folder of its own below ``seed_<n>/``."""
    folders: dict[str, str] = {}
    for model in models:
        folder = slug(model.name)
        if not folder:
            raise ValueError(
                f"model {model.name!r} has no letter a-z or digit to name its folder by; add one"
            )
        if model.kind == "single" and folder in (ENSEMBLES, FINISHED, SAMPLES):
            raise ValueError(
                f"model {model.name!r} would take the folder {folder!r}, kept for others; rename it"
            )
        if folder in folders:
            raise ValueError(
                f"models {folders[folder]!r} and {model.name!r} would share the folder {folder!r}, which has "
                "letters a-z and digits alone; rename one"
            )
        folders[folder] = model.name
