"""The data sets of ``benchmarks.mixing``, and how models of each are trained and scored.

Below ``--work`` lie all images in one shard (``all``), in four shards that share none (``parts``), and in a
ring of four (``ring_0`` to ``ring_3``): each shares a part of its classes with the one before it, and the
other part with the one after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.first_step import Measure
from benchmarks.harness import run_once, shard_digits, shard_photographs
from hddm.utils.errors import HddmError


@dataclass(frozen=True)
class Data:
    """A data set in shards, and fresh images."""

    name: str
    recipe: str
    """Options of ``train expert``, for experts from scratch and others."""
    size: str
    """Size of networks from scratch."""
    router: str
    """Options of ``train router``, without steps and rate."""
    routers: Mapping[str, str]
    """Steps and rate of each router, by its name (`Shards.router`)."""
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
        shard_digits(work, PARTS)
        for k, classes in enumerate(_ring(_DIGITS)):
            words = ["partition", str(work / "digits" / "train"), "--only", classes]
            run_once(work / f"ring_{k}", [*words, "--shards", "1", "--held-out", "0.2"])


class Photographs(Data):
    """Four classes of CIFAR-10 at 16×16 pixels, from JPEG files."""

    def fresh(self, work: Path) -> Path:
        return work / "test" / "shard_0"

    def prepare(self, work: Path, pictures: Path | None) -> None:
        if pictures is None:
            raise HddmError("--pictures: name the folder of train/CLASS/*.jpg and test/CLASS/*.jpg")
        shard_photographs(work, pictures, ",".join(_PHOTOGRAPHS), PARTS)
        for k, classes in enumerate(_ring(_PHOTOGRAPHS)):
            large = work / f"ring_{k}-photos"
            words = ["partition", str(pictures / "train"), "--only", classes]
            run_once(large, [*words, "--shards", "1", "--held-out", "0.1"])
            run_once(work / f"ring_{k}", ["encode", str(large), "--resolution", "16"])


def _ring(groups: Sequence[str]) -> list[str]:
    """Classes of each shard: its own group and the next one."""
    shards = []
    for k, group in enumerate(groups):
        shards.append(f"{group},{groups[(k + 1) % len(groups)]}")
    return shards


@dataclass(frozen=True)
class Shards:
    """Shards of experts below ``--work``, and what a router of them is called and trained on."""

    router: str
    routed: Sequence[str]
    of_experts: Sequence[str]


PARTS = 4
APART = Shards("router", ("parts",), [f"parts/shard_{k}" for k in range(PARTS)])
RING = Shards(
    "router-ring",
    [f"ring_{k}" for k in range(PARTS)],
    [f"ring_{k}/shard_0" for k in range(PARTS)],
)
_DIGITS = ("0,1,2", "3,4,5", "6,7", "8,9")
_PHOTOGRAPHS = ("airplane", "automobile", "horse", "ship")
_OF_BOTH = "--ema-decay 0.99"

DATA: Mapping[str, Data] = {
    "digits": Digits(
        "digits",
        # That of the preset digits, whose rates were chosen on validation images.
        recipe=f"--optimizer adamw --batch-size 32 --learning-rate 8e-3 {_OF_BOTH}",
        size="mini",
        router=f"--optimizer adamw --batch-size 64 --size tiny --calibrate {_OF_BOTH}",
        routers={
            APART.router: "--steps 1600 --learning-rate 4e-3",
            # At the other rate it stays at chance.
            RING.router: "--steps 4800 --learning-rate 1e-3",
        },
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
        router="--optimizer adamw --batch-size 64 --size tiny "
        f"--random-flip --calibrate {_OF_BOTH}",
        routers={
            APART.router: "--steps 1500 --learning-rate 4e-3",
            # Not tried: that of digits.
            RING.router: "--steps 4800 --learning-rate 1e-3",
        },
        # A third of the preset's, which two cores reach in a night.
        steps=500,
        begun_steps=125,
        continued_steps=190,
        likelihood_images=8,
        num_samples=500,
    ),
}
