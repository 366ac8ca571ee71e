"""Calibrated and plain routers under every strategy, on digits."""

from benchmarks.harness import run_over_seeds
from benchmarks.routing.measure import measure_routing
from benchmarks.routing.settings import FULL, QUICK

if __name__ == "__main__":
    run_over_seeds("routing", measure_routing, FULL, QUICK, __doc__)
