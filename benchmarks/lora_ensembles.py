"""LoRA experts of one base beside the base alone: memory, and seconds a call of a batch under ``draw``.

``python -m benchmarks.lora_ensembles`` writes a base with Stable Diffusion 1's shapes and random weights,
eight adapters of rank 16 of its attention and MLPs, and an ensemble of these. Memory is the peak of a process
of its own that calls every expert once on small states, mapped files included; the same for the base alone.
Times are of one process in which the ways take turns: the base network on a batch of eight, the same batch in
which each sample has an expert of its own, and one in which all have the same. Ratios are of the processor's
time, since other work may slow the machine. The last rounds have the base's own states, of 64×64.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import hddm
from benchmarks import full_size
from benchmarks.harness import RESULTS, QuickOption, ResultsOption, Start, WorkOption, apart, main
from benchmarks.timing import Taken, Times, between, in_turn, now, spread
from hddm.experts.adapter_records import adapter_of
from hddm.experts.expert_folders import open_expert
from hddm.experts.lora import factor_shapes, tensor_names, write_adapter
from hddm.experts.record_folders import write_records
from hddm.networks.shared import AdaptedNetwork
from hddm.training.adapters import targets_of

RANK, SEED = 16, 0
SMALL = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "sample_size": 8,
}
GOAL = 1.15


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    experts: int = 8
    batch: int = 8
    side: int = 32
    rounds: int = 5
    full_side: int = 64
    """Of the states of the last rounds."""
    full_rounds: int = 2
    network: str = "sd15"


QUICK = Settings(side=8, rounds=2, full_side=8, full_rounds=1, network="small")


def build(settings: Settings, work: Path) -> None:
    """Write a base, its adapters and their ensemble."""
    if settings.network == "small":
        real = full_size.MODELS["sd15"]
        small = {**real.config, **SMALL}
        full_size.MODELS["small"] = full_size.Model(
            real.network, small, real.scheduler, real.schedule, real.conditions
        )
    full_size.build(settings.network, work / "source")
    hddm.convert(work / "source", work / "base")
    shutil.rmtree(work / "source")
    expert = open_expert(work / "base")
    shapes = {name: one.shape for name, one in expert.network.state_dict().items()}
    made = torch.Generator().manual_seed(SEED)
    for k in range(settings.experts):
        folder, tensors = work / f"style_{k}", dict[str, Tensor]()
        folder.mkdir()
        adapter = adapter_of(work / "base", folder, RANK, RANK, targets_of(expert.network))
        for target, names in tensor_names(adapter.targets).items():
            for name, shape in zip(names, factor_shapes(shapes[target], RANK), strict=True):
                tensors[name] = torch.randn(shape, generator=made) * 0.02
        write_adapter(folder, adapter, tensors)
        expert.network.save_config(folder)
        write_records(
            folder, expert.record.model_copy(update={"adapter": adapter}), dict(expert.nulls)
        )
    hddm.assemble(adapter_folders(settings, work), work / "ensemble", trust_components=True)


def adapter_folders(settings: Settings, work: Path) -> list[Path]:
    """The adapters' folders."""
    return [work / f"style_{k}" for k in range(settings.experts)]


def states(settings: Settings, channels: int, batch: int, side: int) -> dict[str, Tensor]:
    """Arguments of `velocity` for a batch."""
    made = torch.Generator().manual_seed(SEED)
    shape = full_size.MODELS["sd15"].conditions["encoder_hidden_states"]
    return {
        "x_t": torch.randn(batch, channels, side, side, generator=made),
        "t": torch.full((batch,), 0.5, dtype=torch.float64),
        "encoder_hidden_states": torch.randn(batch, *shape, generator=made),
    }


@torch.inference_mode()
def memory(settings: Settings, folder: Path) -> tuple[int, int]:
    """Peak bytes of a process that calls each expert of ``folder``, and bytes of its weights."""
    model = hddm.load(folder)
    if isinstance(model, hddm.Ensemble):
        own = states(settings, 4, settings.experts, 8)
        model.velocity(**own, expert=torch.arange(settings.experts))
        holders = {one.network.holder for one in model.experts}  # type: ignore[attr-defined]
        size = sum(one.size for one in holders)
    else:
        model.velocity(**states(settings, 4, settings.experts, 8))
        size = sum(one.numel() * one.element_size() for one in model.network.parameters())  # type: ignore[attr-defined]
    # Its counter in getrusage begins with the peak of the process that started this one.
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in one]
    return int(line.split()[1]) * 1024, size


@torch.inference_mode()
def times(settings: Settings, work: Path) -> tuple[Times, Times]:
    """Times of every way by round, at the side of ``settings`` and at the base's own."""
    base, ensemble = hddm.load(work / "base"), hddm.load(work / "ensemble")
    assert isinstance(ensemble, hddm.Ensemble)
    assert isinstance(ensemble.experts[0].network, AdaptedNetwork)
    each = torch.arange(settings.batch) % settings.experts

    def ways(side: int) -> dict[str, Any]:
        own = states(settings, 4, settings.batch, side)

        def timed(call: Any) -> Any:
            def run() -> Taken:
                began = now("cpu")
                call()
                return between(began, now("cpu"))

            return run

        return {
            "base": timed(lambda: base.velocity(**own)),
            "an expert each": timed(lambda: ensemble.velocity(**own, expert=each)),
            "one expert": timed(lambda: ensemble.velocity(**own, expert=torch.zeros_like(each))),
        }

    small = ways(settings.side)
    for one in small.values():
        # The first call reads the weights.
        one()
    found = in_turn(small, settings.rounds)
    large = ways(settings.full_side)
    del large["one expert"]
    return found, in_turn(large, settings.full_rounds)


def lines(
    settings: Settings, found: tuple[Times, Times], taken: Mapping[str, Sequence[int]]
) -> list[str]:
    """The result as a text."""
    one, all_of_them = taken["base"], taken["ensemble"]
    text = [
        f"# {settings.experts} LoRA experts of rank {RANK} that share their base",
        "",
        f"Network: {settings.network}, random weights, float32. Goals: memory and seconds a call at most "
        f"{GOAL} times one model's.",
        "",
        "| memory | one model | ensemble | times |",
        "|---|---:|---:|---:|",
        f"| weights | {_gb(one[1])} | {_gb(all_of_them[1])} | {all_of_them[1] / one[1]:.3f} |",
        f"| peak of the process | {_gb(one[0])} | {_gb(all_of_them[0])} | {all_of_them[0] / one[0]:.3f} |",
        "",
        f"| a batch of {settings.batch} | seconds a call | of the processor | its ratio to the base |",
        "|---|---:|---:|---:|",
    ]
    for side, ways in zip((settings.side, settings.full_side), found, strict=True):
        for name in ways:
            seconds = spread([each.seconds for each in ways[name]], 2)
            own = [each.processor for each in ways[name]]
            of_base = [each.processor for each in ways["base"]]
            ratios = [a / b for a, b in zip(own, of_base, strict=True)]
            cells = f"{seconds} | {spread(own, 2)} | {spread(ratios, 3)}"
            text.append(f"| {name}, states of {side}×{side} | {cells} |")
    return text


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


app = typer.Typer(add_completion=False)


@app.command()
def lora_ensembles(
    quick: QuickOption = False,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1)] = None,
    results: ResultsOption = RESULTS,
    work: WorkOption = Path("runs"),
) -> None:
    """Measure an ensemble of LoRA experts beside its base."""
    start, settings = Start(results, work), QUICK if quick else Settings()
    if rounds is not None:
        settings = Settings(**{**asdict(settings), "rounds": rounds})
    folder = work / "lora-ensembles"
    if not (folder / "ensemble").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        build(settings, folder)
    threads = torch.get_num_threads()
    taken = {}
    for name in ("base", "ensemble"):
        taken[name] = apart(threads, memory, settings, folder / name)
    found = apart(threads, times, settings, folder)
    content = {"settings": asdict(settings), "memory": taken, "threads": threads}
    by_side = {}
    for side, ways in zip(("small", "full"), found, strict=True):
        by_side[side] = {name: [asdict(one) for one in each] for name, each in ways.items()}
    content["times"] = by_side
    name = "lora-ensembles-quick" if quick else "lora-ensembles"
    typer.echo(start.write(name, lines(settings, found, taken), content))


if __name__ == "__main__":
    main(app)
