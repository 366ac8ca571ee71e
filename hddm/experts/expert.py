"""An expert: its record, and its network, whose weights are in memory or yet to be read.

Records alone are read here, without torch; folders are opened and written in `hddm.experts.expert_folders`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hddm.experts.ensemble_records import EnsembleRecord, Member
from hddm.experts.records import ExpertRecord, read_expert_record
from hddm.networks.unread import Unread

if TYPE_CHECKING:
    import torch
    from diffusers import ModelMixin
    from torch import Tensor

    from hddm.calibration import Calibration
    from hddm.prompt_router import Topic

UNDECIDED = Member(folder="")
"""Nothing was decided on an expert."""


@dataclass(frozen=True)
class Expert:
    """An expert: its record, what was decided on it in an ensemble, and its network, once that is opened.

    Args:
        opened: its network with its weights in memory, or one whose weights are read on demand, with any
            adapter merged; None where the record alone was read (`read_experts`).
        record: what the weights mean.
        calibration: moments and weights that improve on the network near t = 1.
        nulls: the value of no condition by network keyword, without batch dimension; that of
            ``class_labels`` is in the record.
        weak: the network with the weights to guide by.
        folder: its folder; None in memory.
        base: folder of the weights that its adapter changes.
        topic: what its captions are about, where that was read.
        member: what was decided on it in its ensemble.
    """

    opened: "ModelMixin | Unread[ModelMixin] | None"
    record: ExpertRecord
    calibration: "Calibration | None" = None
    nulls: "Mapping[str, Tensor]" = field(default_factory=dict)
    weak: "Unread[ModelMixin] | None" = None
    folder: Path | None = None
    base: Path | None = None
    topic: "Topic | None" = None
    member: Member = UNDECIDED

    @property
    def name(self) -> str:
        """The expert's name in messages."""
        return "an expert in memory" if self.folder is None else str(self.folder)

    @property
    def place(self) -> Path:
        """The folder of an expert that has one."""
        assert self.folder is not None
        return self.folder

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of its classes, in its own numbering."""
        return self.member.classes or self.record.classes

    @property
    def takes_prompts(self) -> bool:
        """True if it reads text, or has classes, which a prompt may name."""
        return self.record.takes_text or self.record.takes_classes

    @property
    def network(self) -> "ModelMixin":
        """Its network, with or without weights."""
        assert self.opened is not None
        return self.opened.network if isinstance(self.opened, Unread) else self.opened

    @property
    def unread(self) -> "Unread[ModelMixin]":
        """Its network, to be filled with its weights."""
        assert isinstance(self.opened, Unread)
        return self.opened

    def read(self, dtype: "torch.dtype | None" = None) -> "Expert":
        """The expert with its weights in memory, by default in float32; they then belong to no folder."""
        import torch

        network = self.unread.load(dtype or torch.float32)
        record = without_adapter(self.record)
        return replace(self, opened=network, record=record, folder=None, base=None)


def read_experts(folders: Sequence[Path], members: Sequence[Member]) -> list[Expert]:
    """Read the records alone of expert folders; ``members`` are what was decided on them."""
    experts = []
    for folder, member in zip(folders, members, strict=True):
        experts.append(Expert(None, read_expert_record(folder), folder=folder, member=member))
    return experts


def experts_in(ensemble: Path, record: EnsembleRecord) -> list[Expert]:
    """Read the records alone of the experts in an ensemble folder."""
    return read_experts([ensemble / member.folder for member in record.experts], record.experts)


def decided(experts: Sequence[Expert], members: Sequence[Member]) -> list[Expert]:
    """``experts`` with what was decided on each, its ``members``."""
    return [replace(one, member=member) for one, member in zip(experts, members, strict=True)]


def with_decisions(experts: Sequence[Expert], **decisions: Sequence[Any]) -> list[Expert]:
    """``experts`` with these fields of their `Member` replaced, each by one value per expert."""
    updated = []
    for k, one in enumerate(experts):
        own = {name: values[k] for name, values in decisions.items()}
        updated.append(replace(one, member=one.member.model_copy(update=own)))
    return updated


def without_adapter(record: ExpertRecord) -> ExpertRecord:
    """The record of an expert in memory, whose weights include its adapter."""
    return record.model_copy(update={"adapter": None})
