"""A student of a mixed-objective ensemble against its teacher, and a model of its budget, on digits."""

from benchmarks.distillation.measure import measure_distillation
from benchmarks.distillation.settings import FULL, QUICK
from benchmarks.harness import run_over_seeds

if __name__ == "__main__":
    run_over_seeds("distillation", measure_distillation, FULL, QUICK, __doc__)
