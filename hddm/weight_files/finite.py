"""The search for numbers that are none."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from hddm.errors import HddmError


def refuse_non_finite(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights of the file ``path`` with NaN or Inf, by name.

    Raises:
        HddmError: with the first such tensor.
    """
    for key, value in weights.items():
        if not value.isfinite().all():
            raise HddmError(f"{path}: {key!r} holds NaN or Inf; take the weights anew")
