r"""The velocity that an expert is trained on in: its own conversion with a bounded gain.

An epsilon network gives the velocity v_net = (eps - x)/(1 - t), so its output counts 1/(1 - t) times. Flow
matching through that is badly conditioned: near t = 1, where the network can say nothing about the data,
its error and its gradient grow without bound and drown the rest. Instead it is trained on in

    v(x, t) = K(t) v_net(x, t) + (1 - K(t)) v_gauss(x, t),      K(t) = min(1, kappa/gain(t)),

where gain(t) is what the conversion multiplies the network's output with (epsilon 1/(1 - t), sample 1/t),
and v_gauss the velocity of the shard's moments (`hddm.moments`).

- **It starts as the expert.** K = 1 and v = v_net up to t = 1 - 1/kappa. Beyond it v starts between the
  network and the shard's own Gaussian, which is better there than amplified noise.
- **It is well-conditioned.** The output counts min(gain, kappa) times, on the closed interval [0, 1].
- **It can learn anything.** That factor is kappa, not 0, up to t = 1. A fitted table, whose weight reaches
  1, would cut the network off there: right for a network that stays as it is, wrong for one that learns.
- **Limits.** At t = 1 an epsilon expert starts near v = x - m, exact for unconditional data: what is left of
  the network is kappa (eps - x), its error. At t = 0 a sample expert starts near v = -x likewise.

K is piecewise linear in t, since 1/gain is. So the parametrisation is a `Calibration` with the same weight
1 - K for every direction, and every reader of experts knows it.

**Beyond the trained range.** A schedule that ends at t_max < 1 asks the network at t_max, and its output
counts for less and less, like 1 - t or faster (`hddm.velocity`). There K also falls to 0 from t_max on,
whatever the network predicts, so that v = x - m at t = 1 where the bare rule has v = x. What a condition
says is out of reach at t = 1 itself, and dear just below it.

**Against EDM** (arXiv:2206.00364, section 5): its c_skip is (1 - K) v_gauss with an isotropic covariance,
and in velocity units its c_out goes from 1 at t = 0 to the deviation of the data at t = 1. Here the gain
rises from 1 to kappa, since a trained network has to keep its scale where its function is kept.

**kappa = 1.5** was chosen by measurement. Digits: a cosine epsilon expert of 0-4, trained on with 5-9 (64
images a step, rate 1e-3); flow loss on held-out images, the noise of the target included, mean of two seeds
that differ by 0.013 at most (by 0.05 under the bounded weight, min(1, kappa (1 - t))² with kappa = 4):

    steps    kappa 2      4      8     16    inf   inf, bounded loss weight   from scratch
      100      0.505  0.511  0.514  0.522  0.649                      0.751          0.772
      300      0.479  0.483  0.486  0.490  0.563                      0.607          0.588
      800      0.455  0.457  0.459  0.462  0.500                      0.529          0.505

In longer runs at a constant rate the order stays (digits, one seed, linear betas, batch 32):

    steps         kappa 1.3      2      4     paper's recipe
      100             0.509  0.517  0.522              0.565
      400             0.482  0.485  0.487              0.491
    1,600             0.451  0.453  0.454              0.453

and so does it on 16×16 colour photographs (animals to vehicles, at step 0: 0.306, 0.315, 0.324; after 120
steps: 0.291, 0.296, 0.304). A low bound conditions better, and gives the Gaussian of the new shard its say
where a network from elsewhere is wrong anyway. It costs function: with 1.5 an init that knows the shard well,
in data far from Gaussian, is kept up to t = 1/3 only, and might do better with 4; that was not measured.
"""

import torch

from hddm.calibration import Calibration
from hddm.errors import HddmError
from hddm.moments import Moments

KAPPA = 1.5


def bounded_gain(
    prediction_type: str, t_max: float, moments: Moments, kappa: float = KAPPA
) -> Calibration | None:
    """The blend of the module's head as a calibration, None where K = 1 everywhere.

    Args:
        prediction_type: what the network predicts, as `hddm.velocity.PredictionType` spells it.
        t_max: end of its trained range on the common path, `VelocityField.range[1]`.
        moments: of the shard that it is trained on.
        kappa: bound of the gain.

    Raises:
        HddmError: for a kappa of 1 or less, which would preserve nothing.
    """
    if not kappa > 1:
        raise HddmError(f"kappa must be above 1, not {kappa}")
    low, high = 0.0, t_max
    if prediction_type == "epsilon":
        high = min(t_max, 1 - 1 / kappa)
    if prediction_type == "sample":
        low = 1 / kappa
    if low == 0 and high == 1:
        return None
    # A knot that two rules share stands once.
    shares = ({0.0: 1.0} if low > 0 else {}) | {low: 0.0, high: 0.0} | ({1.0: 1.0} if high < 1 else {})
    weights = torch.tensor(list(shares.values()))[:, None].expand(-1, len(moments.variances))
    return Calibration(moments, torch.tensor(list(shares)), weights.contiguous())
