"""Any folder that hddm wrote to a velocity field."""

from pathlib import Path

import torch

from hddm.ensemble import Ensemble
from hddm.ensemble_folders import ENSEMBLE_FILE, read_ensemble_facts
from hddm.errors import HddmError
from hddm.experts import EXPERT_FILE, Expert, null_conditions, read_expert, read_router
from hddm.networks import adapted
from hddm.routing import Router
from hddm.schedules import from_config
from hddm.velocity import VelocityField


def load(
    path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> VelocityField | Ensemble:
    """An expert folder as a `VelocityField`, an ensemble folder as an `Ensemble`.

    Args:
        path: the folder.
        dtype: that networks run in; weights stored in another one are cast.
        device: that networks run on.

    Raises:
        HddmError: for anything else, or a folder whose parts contradict each other.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise HddmError(f"{folder}: no such folder")
    if (folder / EXPERT_FILE).exists():
        return _field(folder, dtype, device)
    if (folder / ENSEMBLE_FILE).exists():
        return _ensemble(folder, dtype, device)
    raise HddmError(
        f"{folder}: neither an expert folder ({EXPERT_FILE}) nor an ensemble folder ({ENSEMBLE_FILE}); a "
        "pretrained checkpoint must become an expert first (hddm convert)"
    )


def field_of(expert: Expert, device: torch.device | str = "cpu") -> VelocityField:
    """An expert as a velocity field that shares its network.

    Raises:
        HddmError: for a schedule that is unknown or does not go with the prediction type.
    """
    facts = expert.facts
    return VelocityField(
        adapted(expert.network, facts.round_time).to(device),
        from_config(facts.schedule),
        facts.prediction_type,
        facts.time_scale,
        expert.calibration,
        conditions=facts.conditions,
        null_conditions=null_conditions(facts.null_class) | dict(expert.nulls),
        sample_shape=facts.sample_shape,
        classes=facts.classes,
    )


def _field(folder: Path, dtype: torch.dtype, device: torch.device | str) -> VelocityField:
    expert = read_expert(folder, dtype)
    try:
        return field_of(expert, device)
    except HddmError as error:
        raise HddmError(f"{folder / EXPERT_FILE}: {error}") from error


def _ensemble(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Ensemble:
    facts = read_ensemble_facts(folder)
    experts = [_field(folder / name, dtype, device) for name in facts.experts]
    router = None
    if facts.router is not None:
        network, router_facts = read_router(folder / facts.router, dtype)
        router = Router(network.to(device), router_facts.time_scale)
    try:
        return Ensemble(experts, router, facts.strategy, facts.prior)
    except HddmError as error:
        raise HddmError(f"{folder / ENSEMBLE_FILE}: {error}") from error
