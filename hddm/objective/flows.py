"""The flows that a model's samples follow, as `hddm.objective.errors` and `likelihood` take them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hddm.calibration import MAX_GAIN
from hddm.condition_names import LABELS
from hddm.ensemble import Ensemble
from hddm.noise import Seeded
from hddm.objective.errors import Velocity
from hddm.objective.likelihood import LARGEST, Flow
from hddm.times import beginner_of
from hddm.velocity import VelocityField


def _end_of(one: VelocityField) -> float:
    if one.prediction.is_of_noise and one.calibration is None:
        return min(one.end, 1 - 1 / MAX_GAIN)
    return min(one.end, LARGEST)


def _velocity_of(model: Ensemble, conditions: Mapping[str, Tensor], expert: int | None) -> Velocity:
    """The velocity of states with these conditions: by one expert, or as the strategy mixes them."""

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        chosen = None if expert is None else torch.full((len(x),), expert)
        options: dict[str, Any] = dict(conditions)
        return model.velocity(x.to(model.device), t, expert=chosen, **options)

    return velocity


def velocities_of(model: Ensemble, conditions: Mapping[str, Tensor]) -> list[Velocity]:
    """The velocity of each expert, for states with these conditions."""
    return [_velocity_of(model, conditions, k) for k in range(len(model.experts))]


def flows_of(
    model: Ensemble, conditions: Mapping[str, Tensor], num: int
) -> tuple[list[Flow], Tensor]:
    """The flows of a model's samples, and the log probability of each for ``num`` images, (flows, num).

    Under ``draw`` each domain has a flow, else the model has one. A router that sees the conditions says
    whose they are at the noise of the first ``num`` samples of seed 0.

    Args:
        model: under its strategy, which is not ``commit-x``.
        conditions: of the images, (num, …).
        num: of images.
    """
    prior = model.prior_of(num, conditions).double().cpu()
    if model.is_seen(conditions) is not None and model.sample_shape is not None:
        noise = Seeded(0).initial(range(num), model.sample_shape)
        prior = model.begun(noise, 1.0, conditions).double()
    labels = conditions.get(LABELS)

    def flow_of(experts: Sequence[int], expert: int | None) -> Flow:
        velocity = _velocity_of(model, conditions, expert)
        beginners = [beginner_of(model, k) for k in experts]
        gaussians = []
        for one in beginners:
            gaussians.append(None if one.calibration is None else one.calibration.moments)
        end = max(_end_of(one) for one in beginners)
        shares = prior[:, list(experts)].T
        total = shares.sum(0)
        return Flow(velocity, end, gaussians, shares / torch.where(total > 0, total, 1), labels)

    domains = dict[int, list[int]]()
    for k, domain in enumerate(model.domains):
        domains.setdefault(domain, []).append(k)
    if model.strategy != "draw" or len(domains) == 1:
        alone = 0 if len(domains) == 1 else None
        return [flow_of(range(len(model.experts)), alone)], torch.zeros(1, num).double()
    flows, shares = [], []
    for members in domains.values():
        flows.append(flow_of(members, members[0]))
        shares.append(prior[:, members].sum(1))
    return flows, torch.stack(shares).log()
