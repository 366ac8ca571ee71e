"""Which experts run, by name.

Strategies, for probabilities p of one sample over K experts:

    full          weights p
    top-k         the k most probable (ties to the lower index), k in 1 … K
    threshold-x   every expert with p >= x, the most probable one if there is none
    nucleus-x     the smallest set of the most probable whose sum reaches x
    draw          one expert, drawn once a sample from the prior and kept to the end of sampling

The weights of those chosen are renormalised to sum to 1.
"""

from dataclasses import dataclass

from hddm.errors import HddmError


@dataclass(frozen=True)
class Strategy:
    """A parsed strategy; ``value`` is k or x, and unused by the others."""

    kind: str
    value: float = 0.0

    @classmethod
    def parse(cls, name: str) -> "Strategy":
        """Read ``top-2``, ``full``, ``threshold-0.1``, ``nucleus-0.9`` or ``draw``.

        Raises:
            HddmError: for another name, a k below 1 or an x outside (0, 1].
        """
        kind, _, value = name.partition("-")
        if name in ("full", "draw"):
            return cls(kind)
        if kind == "top" and value.isdecimal() and int(value) >= 1:
            return cls(kind, int(value))
        if kind in ("threshold", "nucleus"):
            try:
                share = float(value)
            except ValueError:
                share = float("nan")
            if 0 < share <= 1:
                return cls(kind, share)
        raise HddmError(
            f"unknown strategy {name!r}: choose top-K (K = 1, 2, …), full, threshold-X or nucleus-X "
            "(0 < X <= 1), or draw"
        )

    def check(self, num_experts: int) -> None:
        """Refuse a k above the number of experts."""
        if self.kind == "top" and self.value > num_experts:
            raise HddmError(f"top-{self.value:g} needs {self.value:g} experts and there are {num_experts}")
