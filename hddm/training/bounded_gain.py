r"""The bounded gain: the parametrisation in which flow matching trains an existing expert on.

An epsilon expert that is trained on with flow matching learns badly through 1/(1 - t): near
t = 1 its error and its gradient grow without bound. It is trained on in

    v(x, t) = K(t) v_net(x, t) + (1 - K(t)) v_gauss(x, t),      K(t) = min(1, kappa/gain(t)),

where gain(t) is the factor of the network's output in the conversion (epsilon 1/(1 - t), sample 1/t).

- It starts as the expert: K = 1 and v = v_net up to t = 1 - 1/kappa.
- It is well-conditioned: the output counts min(gain, kappa) times, on the closed interval [0, 1].
- It can learn anything: that factor is kappa, not 0, up to t = 1. A fitted table, whose weight reaches 1,
  would cut the network off there: right for a network that stays as it is, wrong for one that learns.
- At t = 1 an epsilon expert starts near v = x - m, exact for unconditional data: what is left of the
  network is kappa (eps - x), its error. At t = 0 a sample expert starts near v = -x likewise.

K is piecewise linear in t, since 1/gain is. So the parametrisation is a `Calibration` with the weight 1 - K
for every direction, and every reader of experts knows it. With a schedule that ends at t_max < 1 the network
is evaluated at t_max (`hddm.velocity`). There K also falls to 0 from t_max on, whatever the network predicts,
so that v = x - m at t = 1 where the bare rule has v = x. A condition has no effect at t = 1 itself.

Against EDM (arXiv:2206.00364, section 5): its c_skip is (1 - K) v_gauss with an isotropic covariance, and in
velocity units its c_out goes from 1 at t = 0 to the deviation of the data at t = 1. Here the gain rises from
1 to kappa, since a trained network has to keep its scale where its function is kept. How kappa was chosen:
docs/notes/bounded-gain.md.
"""

from dataclasses import replace

import torch
from torch import Tensor

from hddm.calibration import Calibration, Moments
from hddm.data.shards import Shard
from hddm.experts.expert import Expert
from hddm.predictions import PredictionType
from hddm.training.calibrate import calibration_origin, calibration_rows
from hddm.velocity import VelocityField

KAPPA = 1.5


def gauss_shares(prediction_type: str, t_max: float, kappa: float = KAPPA) -> dict[float, float]:
    """1 - K(t) of a bounded gain by t, linear between; empty where K = 1 everywhere."""
    low, high = PredictionType(prediction_type).prediction.bounded_part(kappa)
    high = min(t_max, high)
    if low == 0 and high == 1:
        return {}
    # A dictionary keeps a knot that two rules share once.
    shares: dict[float, float] = {}
    if low > 0:
        shares[0.0] = 1.0
    shares[low] = 0.0
    shares[high] = 0.0
    if high < 1:
        shares[1.0] = 1.0
    return shares


def bounded_gain(
    prediction_type: str, t_max: float, moments: Moments, kappa: float = KAPPA
) -> Calibration | None:
    """The blend of K(t) as a calibration, None where K = 1 everywhere.

    Args:
        prediction_type: what the network predicts, as `hddm.predictions.PredictionType` spells it.
        t_max: end of its trained range on the common path, `VelocityField.range[1]`.
        moments: of the shard that it is trained on.
        kappa: bound of the gain, above 1.
    """
    shares = gauss_shares(prediction_type, t_max, kappa)
    if not shares:
        return None
    weights = torch.tensor(list(shares.values()))[:, None].expand(-1, len(moments.variances))
    return Calibration(moments, torch.tensor(list(shares)), weights.contiguous())


def calibration_to_train_in(
    expert: Expert, field: VelocityField, shard: Shard, labels: Tensor | None
) -> Calibration | None:
    """Return the init's own calibration if its weights were trained in one, else a new one."""
    if expert.record.training_calibration:
        return expert.calibration
    if not gauss_shares(field.prediction_type, field.range[1], KAPPA):
        return None
    rows = calibration_rows(shard)
    moments = Moments.of(shard.take(rows), None if labels is None else labels[rows])
    blend = bounded_gain(field.prediction_type, field.range[1], moments, KAPPA)
    return blend and replace(blend, record=calibration_origin(shard))
