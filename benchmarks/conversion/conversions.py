"""The naive conversion of an epsilon expert, to show what the exact one is worth."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hddm.networks.calls import Calls
from hddm.utils.tensors import append_dims
from hddm.velocity import VelocityField


class SameTimeField(VelocityField):
    """The naive conversion of an epsilon expert: the same x at the same number t.

    v = (eps - x)/(1 - t) with eps = network(x, t): neither is the noise level matched nor the state
    rescaled. v = x at t = 1, as in the exact field.
    """

    def raw_calls(self, x: Tensor, t: Tensor, conditions: Mapping[str, Tensor]) -> Calls:
        eps = yield from self.output_calls(x, t, conditions)
        wide = append_dims(t, x.ndim).to(x)
        return torch.where(wide == 1, x, (eps - x) / (1 - wide))
