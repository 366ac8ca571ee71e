"""The stages of the kit, in the order in which they run: those without a download first."""

from collections.abc import Sequence
from functools import partial

from benchmarks.acceptance.checkpoints import compare
from benchmarks.acceptance.device_tests import device_tests
from benchmarks.acceptance.entries import ENTRIES
from benchmarks.acceptance.loras import compare_lora
from benchmarks.acceptance.memory import sdxl_shapes
from benchmarks.acceptance.offloading import offloading
from benchmarks.acceptance.quality import dino, fid
from benchmarks.acceptance.stages import Kit, Stage
from benchmarks.figures import Result
from benchmarks.training.checklist import NEED_GPU, checks
from hddm.utils.errors import UsageError


def all_stages(device: str) -> list[Stage]:
    """Every stage."""
    stages = [
        Stage("tests", "tests", "Tests marked gpu", device_tests),
        Stage("offload", "offload", "Offloaded experts arrive while others compute", offloading),
        Stage("memory", "memory", "SDXL's shapes at 1024 pixels beside diffusers", sdxl_shapes),
    ]
    for name in checks(device):
        slug = name.replace(", ", "-").replace(" ", "-").replace("/", "")
        title = f"Training and sampling: {name}"
        stage = Stage(
            f"speed-{slug}",
            "speed",
            title,
            partial(checked, name),
            needs_gpu=name in NEED_GPU,
        )
        stages.append(stage)
    stages.append(Stage("dino", "dino", "A partition by DINOv2", dino, uses=("images",)))
    for entry in ENTRIES:
        compared = Stage(
            f"checkpoint-{entry.name}",
            "checkpoints",
            entry.title,
            partial(compare, entry),
            identity=repr(entry),
            memory=entry.memory,
        )
        stages.append(compared)
        if entry.lora is not None:
            adapted = Stage(
                f"lora-{entry.name}",
                "loras",
                f"LoRA {entry.lora.repo} on {entry.title}",
                partial(compare_lora, entry),
                identity=repr(entry),
                memory=entry.memory,
            )
            stages.append(adapted)
    uses = ("samples", "statistics")
    stages.append(Stage("fid", "fid", "FID of DiT-XL/2 at 256 pixels", fid, uses=uses))
    return stages


def checked(name: str, kit: Kit) -> Result:
    """One check of training or sampling."""
    return checks(kit.device)[name](kit.device)


def chosen(stages: Sequence[Stage], only: Sequence[str], again: Sequence[str]) -> list[Stage]:
    """Stages of these names or groups; all without any. Raises `UsageError` for unknown names."""
    known = {name for one in stages for name in (one.name, one.group)}
    unknown = sorted({*only, *again} - known)
    if unknown:
        raise UsageError(f"{unknown[0]}: no stage; choose {', '.join(one.name for one in stages)}")
    return [one for one in stages if not only or {one.name, one.group} & {*only}]
