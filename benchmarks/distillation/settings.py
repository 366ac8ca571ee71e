"""What is trained, at which budget, and which rows are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.harness import QUICKSTART, short_quickstart
from hddm.benchmark.settings import BenchmarkSettings
from hddm.training.settings import DistillSettings, ExpertSettings

TEACHER, MIXTURE = "teacher, draw", "teacher, full"
STUDENT, COUNTED, CONTROL = "student", "student, its teacher's forwards counted", "trained on data"
ROWS = (TEACHER, MIXTURE, STUDENT, COUNTED, CONTROL)
FORWARD, STEP = 1, 3
"""Cost of an image in forwards of the network: an evaluation; a training step, whose backward counts two."""
TUNING_SEED = 100


@dataclass(frozen=True)
class Recipe:
    """How a student or a control is optimised, and what it begins with."""

    batch_size: int
    learning_rate: float
    time_sampling: Literal["uniform", "logit-normal"] = "uniform"
    init: bool = False
    """It begins with the teacher's last expert, a flow expert, instead of random weights."""

    def __str__(self) -> str:
        begins = ", begun as a flow expert" if self.init else ""
        return (
            f"batch {self.batch_size}, learning rate {self.learning_rate:g}, {self.time_sampling} t{begins}"
        )


@dataclass(frozen=True)
class Settings:
    """Of the benchmark; experts, router, solver and scores are the quickstart's."""

    quickstart: BenchmarkSettings = QUICKSTART
    num_ddpm: int = 2
    """DDPM experts, on the first shards; the others learn flow."""
    share: int = 4
    """The student has this part of the teacher's training compute."""
    recipes: Sequence[Recipe] = (
        Recipe(32, 4e-3),
        Recipe(32, 8e-3),
        Recipe(32, 8e-3, "logit-normal"),
        Recipe(32, 8e-3, "uniform", init=True),
        Recipe(32, 4e-3, "logit-normal", init=True),
        Recipe(32, 8e-3, "logit-normal", init=True),
    )
    """Tried at the same budget; the best is taken."""
    name: str = "digits"

    @property
    def num_shards(self) -> int:
        """Experts of a teacher."""
        return self.quickstart.partition.shards

    @property
    def teacher_images(self) -> int:
        """Images that all experts of a teacher are trained on together."""
        expert = self.quickstart.expert("flow", 0)
        return expert.steps * expert.batch_size * self.num_shards

    def images(self, row: str) -> int:
        """Images that the model of a row is trained on."""
        if row in (TEACHER, MIXTURE):
            return self.teacher_images
        counted = STEP + FORWARD if row == COUNTED else STEP
        return self.teacher_images * STEP // (self.share * counted)

    def compute(self, row: str) -> tuple[float, float]:
        """Training compute of a row as a share of the teacher's: its own, and with its teacher's forwards."""
        own = self.images(row) / self.teacher_images
        asks = row in (STUDENT, COUNTED)
        return own, own * (STEP + FORWARD) / STEP if asks else own

    def student(self, row: str, recipe: Recipe, seed: int) -> DistillSettings:
        """The training of a student's row."""
        return DistillSettings.model_validate(self._training(row, recipe, seed))

    def control(self, recipe: Recipe, seed: int) -> ExpertSettings:
        """The flow model that sees as many images as the student, and no teacher."""
        return ExpertSettings.model_validate({"objective": "flow", **self._training(CONTROL, recipe, seed)})

    def _training(self, row: str, recipe: Recipe, seed: int) -> dict[str, Any]:
        expert = self.quickstart.expert("flow", seed)
        return {
            "steps": max(self.images(row) // recipe.batch_size, 1),
            "batch_size": recipe.batch_size,
            "optimizer": "adamw",
            "learning_rate": recipe.learning_rate,
            "ema_decay": expert.ema_decay,
            "size": expert.size,
            "seed": seed,
            "time_sampling": recipe.time_sampling,
        }


FULL = Settings()
QUICK = Settings(
    short_quickstart(),
    num_ddpm=1,
    recipes=(Recipe(16, 4e-3), Recipe(8, 4e-3, "logit-normal", init=True)),
    name="digits-quick",
)
