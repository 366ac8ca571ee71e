"""What a quickstart trains and measures. Every number is written into its results."""

from typing import Annotated

from pydantic import Field

from hddm.training.expert import ExpertSettings
from hddm.training.router import RouterSettings
from hddm.training.settings import Positive
from hddm.utils.errors import HddmError
from hddm.utils.records import Record


class QuickstartSettings(Record):
    """Settings of `hddm.benchmark.quickstart.quickstart`.

    The single model has batches of ``batch_size``, each expert ``steps`` of ``batch_size / num_shards``; how
    many steps the single model takes follows from the compute of the ensemble with its router
    (`hddm.benchmark.compute`).
    """

    num_shards: Positive = 4
    steps: Positive = 1600
    batch_size: Positive = 128
    learning_rate: float = 4e-3
    ema_decay: float = 0.99
    size: str = "small"
    router_size: str = "tiny"
    router_batch_size: Positive = 64
    sampling_steps: Positive = 30
    solver: str = "adams-bashforth"
    strategy_solver: str = "euler"
    """One-step, since a multistep solver extrapolates across a change of experts."""
    num_images: Positive = 1437
    num_images_per_strategy: Positive = 1000
    strategies: tuple[str, ...] = (
        "draw",
        "top-1",
        "top-2",
        "threshold-0.2",
        "nucleus-0.9",
        "full",
    )
    resamples: Annotated[int, Field(ge=2)] = 100
    seeds: Positive = 1
    workers: Positive = 2

    def expert(self, objective: str, seed: int) -> ExpertSettings:
        """One expert of an ensemble."""
        if self.batch_size % self.num_shards:
            raise HddmError(
                f"batch size {self.batch_size} does not divide into {self.num_shards} shards: "
                "the comparison would not be at equal compute"
            )
        return ExpertSettings.model_validate(
            {
                "objective": objective,
                "steps": self.steps,
                "batch_size": self.batch_size // self.num_shards,
                "learning_rate": self.learning_rate,
                "ema_decay": self.ema_decay,
                "size": self.size,
                "seed": seed,
            }
        )

    def router(self, seed: int) -> RouterSettings:
        """The router of all ensembles."""
        return RouterSettings(
            steps=self.steps,
            batch_size=self.router_batch_size,
            learning_rate=self.learning_rate,
            ema_decay=self.ema_decay,
            size=self.router_size,
            seed=seed,
        )
