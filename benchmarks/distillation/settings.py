"""What is trained, at which budget, and which rows are sampled."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hddm.benchmark.quickstart import QuickstartSettings
from hddm.training.settings import DistillSettings, ExpertSettings
from hddm.utils.errors import HddmError
from hddm.utils.files import read_json, write_json

SETTINGS_FILE = "settings.json"
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

    quickstart: QuickstartSettings = field(default_factory=QuickstartSettings)
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
    def teacher_images(self) -> int:
        """Images that all experts of a teacher are trained on together."""
        return self.quickstart.steps * self.quickstart.batch_size

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
        return {
            "steps": max(self.images(row) // recipe.batch_size, 1),
            "batch_size": recipe.batch_size,
            "learning_rate": recipe.learning_rate,
            "ema_decay": self.quickstart.ema_decay,
            "size": self.quickstart.size,
            "seed": seed,
            "time_sampling": recipe.time_sampling,
        }


def as_json(settings: Settings) -> dict[str, Any]:
    """``settings`` as a JSON file gives them back."""
    plain = {**asdict(settings), "quickstart": settings.quickstart.model_dump(mode="json")}
    content: dict[str, Any] = json.loads(json.dumps(plain))
    return content


def check_kept(folder: Path, settings: Settings) -> None:
    """Record ``settings`` beside the models and rows that are kept in ``folder`` by their names alone.

    Raises:
        HddmError: for models or rows of other settings.
    """
    path, now = folder / SETTINGS_FILE, as_json(settings)
    before = read_json(path) if path.exists() else now
    if before != now:
        raise HddmError(
            f"{folder}: keeps models and rows of other settings; pass another --work, or delete that folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, now)


FULL = Settings()
QUICK = Settings(
    QuickstartSettings(
        num_shards=2,
        steps=12,
        batch_size=32,
        size="tiny",
        router_batch_size=16,
        sampling_steps=2,
        num_images=80,
        num_images_per_strategy=80,
        resamples=3,
    ),
    num_ddpm=1,
    recipes=(Recipe(16, 4e-3), Recipe(8, 4e-3, "logit-normal", init=True)),
    name="digits-quick",
)
