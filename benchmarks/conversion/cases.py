"""What the convergence question is asked of, and everything that is the same for all starts."""

from dataclasses import dataclass, replace

from benchmarks.conversion.starts import EXACT, FOLD_RANK, PAPER, SCRATCH, STARTS, Size
from hddm.training.settings import LoopSettings

QUICK = "-quick"


@dataclass(frozen=True)
class Case:
    """A data set and everything that is the same for all its starts.

    Learning rates are tuned for each start alone, on ``tuning_steps``; with ``reverse_tuning`` on the other
    part of the data, under a checkpoint of its own, else on other held-out images and another seed.
    """

    name: str
    size: Size
    pretraining: LoopSettings
    training: LoopSettings
    starts: tuple[str, ...]
    rates: tuple[float, ...]
    tuning_steps: int
    reverse_tuning: bool
    validation_images: int
    repeats: int
    samples: int
    sampling_steps: int
    first_mark: int = 5
    distances_at: tuple[float, ...] = (0, 0.125, 0.25, 0.5, 1)
    """Shares of the steps at which samples are drawn and their distance is taken."""


DIGITS = Case(
    name="digits",
    size=Size(patch=4, width=128, depth=4, heads=4),
    pretraining=LoopSettings(
        steps=2000, batch_size=64, optimizer="adamw", learning_rate=4e-3, ema_decay=0.99
    ),
    training=LoopSettings(steps=1600, batch_size=32, warmup=50, ema_decay=0.99),
    starts=tuple(STARTS),
    rates=(2.5e-4, 1e-3, 4e-3),
    tuning_steps=500,
    reverse_tuning=True,
    validation_images=1000,
    repeats=8,
    samples=720,
    sampling_steps=20,
)
CIFAR = Case(
    name="cifar",
    size=Size(patch=2, width=128, depth=4, heads=4),
    pretraining=LoopSettings(
        steps=1500, batch_size=32, optimizer="adamw", learning_rate=2e-3, ema_decay=0.995
    ),
    training=LoopSettings(steps=600, batch_size=32, warmup=50, ema_decay=0.99),
    starts=(SCRATCH, PAPER, EXACT, FOLD_RANK),
    rates=(1e-3, 4e-3),
    tuning_steps=150,
    reverse_tuning=False,
    validation_images=500,
    repeats=2,
    samples=500,
    sampling_steps=10,
    first_mark=10,
    distances_at=(0, 0.25, 1),
)


def quick(case: Case) -> Case:
    """The same in a minute: nothing that it says means anything."""
    tiny = Size(patch=case.size.patch, width=32, depth=2, heads=2)
    return replace(
        case,
        name=f"{case.name}{QUICK}",
        size=tiny,
        pretraining=case.pretraining.model_copy(update={"steps": 40}),
        training=case.training.model_copy(update={"steps": 30, "warmup": 5}),
        tuning_steps=10,
        validation_images=64,
        repeats=2,
        samples=80,
        sampling_steps=2,
        first_mark=5,
    )
