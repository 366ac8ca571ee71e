"""The data sets of ``benchmarks.mixing``, and how models of each are trained and scored."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.first_step import Measure
from benchmarks.harness import shard_digits, shard_photographs
from hddm.utils.errors import HddmError


@dataclass(frozen=True)
class Data:
    """A data set: all of it in one shard (``all``) and in four (``parts``), and fresh images."""

    name: str
    recipe: str
    """Options of ``train expert``, for experts from scratch and others."""
    size: str
    """Size of networks from scratch."""
    router: str
    """Options of ``train router``."""
    steps: int
    """Steps of training of a whole budget."""
    begun_steps: int
    """Steps of the one checkpoint that experts of shards go on from."""
    continued_steps: int
    """Steps of each of these experts."""
    likelihood_images: int
    """Held-out images whose bits are computed."""
    num_samples: int
    """Samples of each seed of noise whose distance is computed."""

    def fresh(self, work: Path) -> Path:
        """The shard, or folder, of images that no model and no calibration has seen."""
        raise NotImplementedError

    def prepare(self, work: Path, pictures: Path | None) -> None:
        """Write the shards below ``work``, unless they are there."""
        raise NotImplementedError

    def measure(self, work: Path) -> Measure:
        """The distance to fresh images."""
        return Measure(work / "all" / "shard_0", self.fresh(work))


class Digits(Data):
    """scikit-learn's digits, 8×8 pixels."""

    def fresh(self, work: Path) -> Path:
        return work / "digits" / "held_out"

    def prepare(self, work: Path, pictures: Path | None) -> None:
        if pictures is not None:
            raise HddmError(f"--pictures {pictures}: is for photographs; leave it out for digits")
        shard_digits(work, _PARTS)


class Photographs(Data):
    """Four classes of CIFAR-10 at 16×16 pixels, from JPEG files."""

    def fresh(self, work: Path) -> Path:
        return work / "test" / "shard_0"

    def prepare(self, work: Path, pictures: Path | None) -> None:
        if pictures is None:
            raise HddmError("--pictures: name the folder of train/CLASS/*.jpg and test/CLASS/*.jpg")
        shard_photographs(work, pictures, _CLASSES, _PARTS)


_PARTS = 4
_CLASSES = "airplane,automobile,horse,ship"
_OF_BOTH = "--ema-decay 0.99"

DATA: Mapping[str, Data] = {
    "digits": Digits(
        "digits",
        # That of the preset digits, whose rates were chosen on validation images.
        recipe=f"--optimizer adamw --batch-size 32 --learning-rate 8e-3 {_OF_BOTH}",
        size="mini",
        router="--optimizer adamw --steps 1600 --batch-size 64 --learning-rate 4e-3 --size tiny "
        f"--calibrate {_OF_BOTH}",
        steps=1600,
        begun_steps=400,
        continued_steps=1200,
        likelihood_images=64,
        num_samples=1000,
    ),
    "photographs": Photographs(
        "photographs",
        # That of the preset photographs, in float32.
        recipe=f"--optimizer muon --batch-size 64 --learning-rate 1.6e-3 --random-flip {_OF_BOTH}",
        size="4x128/2",
        router="--optimizer adamw --steps 1500 --batch-size 64 --learning-rate 4e-3 --size tiny "
        f"--random-flip --calibrate {_OF_BOTH}",
        # A third of the preset's, which two cores reach in a night.
        steps=500,
        begun_steps=125,
        continued_steps=190,
        likelihood_images=8,
        num_samples=500,
    ),
}
