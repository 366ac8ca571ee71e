"""Every kind of schedule with its definition written anew, and every legal prediction type."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor

from hddm.classes import join_classes
from hddm.ensemble import Part
from hddm.predictions import PredictionType
from hddm.schedules import CosineSchedule, LinearSchedule, Schedule, from_diffusers
from hddm.velocity import VelocityField
from tests.oracles import AlphaSigma, GaussianMixture, OracleNetwork

TRAINED_BETAS = (0.004 + 0.03 * np.sin(np.arange(120) / 40) ** 2).tolist()
BETAS = {
    "ddpm-linear": {"beta_schedule": "linear"},
    "sd-scaled-linear": {
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "beta_end": 0.012,
    },
    "squaredcos-cap-v2": {"beta_schedule": "squaredcos_cap_v2"},
    "sigmoid": {"beta_schedule": "sigmoid"},
    "trained-betas": {"trained_betas": TRAINED_BETAS, "num_train_timesteps": len(TRAINED_BETAS)},
}


@dataclass(frozen=True)
class Case:
    """A schedule under test and its (a, s) of native time in float64, written independently."""

    name: str
    schedule: Schedule
    alpha_sigma: AlphaSigma
    scheduler: diffusers.DDPMScheduler | None = None

    def common_time(self, native: float) -> float:
        """t = s/(a + s)."""
        a, s = self.alpha_sigma(torch.tensor([native], dtype=torch.float64))
        return (s / (a + s)).item()


@dataclass(frozen=True)
class BetaTable:
    """(a, s) from the betas by their definition, between indices as `DiscreteSchedule` documents.

    The log-SNR is linear in the index; a/s is, in the last interval, where the last index has none.
    """

    betas: np.ndarray

    def __call__(self, time: Tensor) -> tuple[Tensor, Tensor]:
        kept = np.cumprod(1 - self.betas.astype(np.float64))
        index = np.arange(len(kept))
        native = time.numpy()
        positive = kept > 0
        log_snr = np.log(kept[positive] / (1 - kept[positive]))
        ratio = np.exp(np.interp(native, index[positive], log_snr) / 2)
        if not positive[-1]:
            last = len(kept) - 2
            ratio *= np.where(native > last, last + 1 - native, 1.0)
        tensor = torch.from_numpy(ratio)
        return tensor / (1 + tensor**2).sqrt(), 1 / (1 + tensor**2).sqrt()


def linear_path(time: Tensor) -> tuple[Tensor, Tensor]:
    """Flow matching."""
    return 1 - time, time


def cosine_path(time: Tensor) -> tuple[Tensor, Tensor]:
    """Continuous cosine."""
    return torch.cos(math.pi / 2 * time), torch.sin(math.pi / 2 * time)


def discrete_case(name: str, rescaled: bool) -> Case:
    """The case of ``BETAS[name]``, with zero terminal SNR where ``rescaled``."""
    scheduler = diffusers.DDPMScheduler(**BETAS[name], rescale_betas_zero_snr=rescaled)
    table = BetaTable(scheduler.betas.numpy())
    return Case(name + "-ztsnr" * rescaled, from_diffusers(scheduler), table, scheduler=scheduler)


LINEAR = Case("linear", LinearSchedule(), linear_path)
COSINE = Case("cosine", CosineSchedule(), cosine_path)
CONTINUOUS = [LINEAR, COSINE]
DISCRETE = [discrete_case(name, rescaled) for name in BETAS for rescaled in (False, True)]
CASES = CONTINUOUS + DISCRETE
LEGAL = [
    pytest.param(case, prediction_type, id=f"{case.name}-{prediction_type}")
    for case in CASES
    for prediction_type in (kind.value for kind in PredictionType)
    if case in CONTINUOUS or prediction_type != "flow_prediction"
]

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_discrete = pytest.mark.parametrize("case", DISCRETE, ids=lambda case: case.name)
each_legal = pytest.mark.parametrize(("case", "prediction_type"), LEGAL)


def case_named(name: str) -> Case:
    """The case called ``name``."""
    return next(case for case in CASES if case.name == name)


def oracle_field(
    shard: GaussianMixture,
    case: Case = LINEAR,
    prediction_type: str = "flow_prediction",
    time_scale: float = 1.0,
    **options: Any,
) -> VelocityField:
    """The optimal expert of ``shard`` on the case's schedule."""
    network = OracleNetwork(shard, case.alpha_sigma, prediction_type, time_scale)
    return VelocityField(network, case.schedule, prediction_type, time_scale, **options)


class ConditionSum:
    """A network that gives ``value`` plus its conditions, one number each a sample; it keeps its calls."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.states: list[Tensor] = []
        self.conditions: list[dict[str, list[float]]] = []

    def __call__(self, y: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        self.states.append(y)
        self.conditions.append({name: value.tolist() for name, value in conditions.items()})
        return torch.full_like(y, self.value) + sum(
            c.to(y).view(-1, 1, 1, 1) for c in conditions.values()
        )

    def field(self, *conditions: str, **options: Any) -> VelocityField:
        """An expert that takes these ``conditions`` alone."""
        return VelocityField(
            self, LINEAR.schedule, "flow_prediction", conditions=conditions, **options
        )


def in_parts(
    fields: Sequence[VelocityField],
    domains: Sequence[int] | None = None,
    class_prior: Sequence[Sequence[float]] | Tensor = (),
) -> list[Part]:
    """Parts of an ensemble, with the numbers of their domains, and p(k | class) a row for each class."""
    names = join_classes(tuple(field.classes for field in fields)).names or tuple(
        map(str, range(len(class_prior)))
    )
    rows = dict(
        zip(names, torch.as_tensor(class_prior, dtype=torch.float64).tolist(), strict=False)
    )
    return [
        Part(
            field,
            1.0,
            {name: row[k] for name, row in rows.items()},
            None if domains is None else domains[k],
        )
        for k, field in enumerate(fields)
    ]
