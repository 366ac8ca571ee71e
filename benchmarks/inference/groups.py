"""``python -m benchmarks.inference.groups``: where a step of `top-1` loses time, layer by layer.

An ensemble of eight experts under `top-1` runs eight networks on an eighth of the batch each, and a single
model one network on the whole batch: as many operations. This times the parts of a block both ways, in turn,
by dtype and number of threads, without anything of hddm around them. What is slow here is so in the library,
whatever calls it. Linear layers are also timed on eight groups and one weight, which tells weights that are
packed eight times from calls of few rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import RESULTS, QuickOption, ResultsOption, Start, main
from benchmarks.timing import DTYPES, Taken, Times, between, in_turn, now, quartiles, ratios

GROUPS = 8
WHOLE, APART, SHARED = "whole batch", "eight groups", "eight groups, one weight"


@dataclass(frozen=True)
class Shape:
    """Of a batch in a block: samples, tokens, width and heads."""

    batch: int = 64
    tokens: int = 256
    width: int = 384
    heads: int = 6


def ways_of(shape: Shape, dtype: torch.dtype) -> dict[str, dict[str, Callable[[], object]]]:
    """What is timed, by part of a block and way to run it."""
    rows, few = shape.batch * shape.tokens, shape.batch * shape.tokens // GROUPS
    whole = torch.randn(rows, shape.width).to(dtype)
    parts = list(whole.split(few))
    weights = [torch.randn(4 * shape.width, shape.width).to(dtype) for _ in range(GROUPS)]
    heads = torch.randn(shape.batch, shape.heads, shape.tokens, shape.width // shape.heads).to(
        dtype
    )
    heads_apart = list(heads.split(shape.batch // GROUPS))

    def attend(one: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(one, one, one)

    def linear_apart() -> object:
        return [functional.linear(one, own) for one, own in zip(parts, weights, strict=True)]

    return {
        "linear": {
            WHOLE: lambda: functional.linear(whole, weights[0]),
            APART: linear_apart,
            SHARED: lambda: [functional.linear(one, weights[0]) for one in parts],
        },
        "attention": {WHOLE: lambda: attend(heads), APART: lambda: list(map(attend, heads_apart))},
        "activation": {
            WHOLE: lambda: functional.gelu(whole),
            APART: lambda: list(map(functional.gelu, parts)),
        },
    }


@torch.no_grad()
def measure(ways: dict[str, Callable[[], object]], rounds: int) -> Times:
    """Times of these ways, after a warm-up, all in turn."""

    def timed(way: Callable[[], object]) -> Callable[[], Taken]:
        way()

        def once() -> Taken:
            began = now("cpu")
            way()
            return between(began, now("cpu"))

        return once

    return in_turn({name: timed(way) for name, way in ways.items()}, rounds)


def groups(
    results: ResultsOption = RESULTS,
    threads: Annotated[list[int] | None, typer.Option(help="Several are possible.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 21,
    quick: QuickOption = False,
) -> None:
    """Time the parts of a block on a whole batch, and on eight groups of it."""
    start = Start(results)
    shape = Shape(tokens=16, width=96) if quick else Shape()
    lines = [
        "# Parts of a block on a whole batch, and on eight groups of it",
        f"{shape}. Time beside that of the whole batch, by rounds: median and quartiles of {rounds}.",
        f"oneDNN computes bfloat16 here: {torch.ops.mkldnn._is_mkldnn_bf16_supported()}.",
        "",
        "| threads | dtype | part | way | ms of the whole batch | beside it |",
        "|---:|---|---|---|---:|---:|",
    ]
    content = []
    for count in threads or [1, 2]:
        torch.set_num_threads(count)
        for dtype, kind in DTYPES.items():
            for part, ways in ways_of(shape, kind).items():
                times = measure(ways, rounds)
                base = quartiles([one.seconds for one in times[WHOLE]])[1]
                for way in ways:
                    if way == WHOLE:
                        continue
                    low, middle, high = quartiles(ratios(times, way, WHOLE))
                    shown = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
                    lines.append(
                        f"| {count} | {dtype} | {part} | {way} | {1000 * base:.1f} | {shown} |"
                    )
                    print(lines[-1], flush=True)
                    content.append([count, dtype, part, way, base, low, middle, high])
    typer.echo(
        start.write("inference-groups", lines, {"threads": threads or [1, 2], "rows": content})
    )


if __name__ == "__main__":
    main(lambda: typer.run(groups))
