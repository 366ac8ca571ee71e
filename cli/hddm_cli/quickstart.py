"""hddm quickstart."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hddm.utils.errors import optional
from hddm.utils.records import BENCHMARK_FILE
from hddm_cli.options import Overwrite, refuse_other

if TYPE_CHECKING:
    from hddm.benchmark.results import Results

OTHERWISE = (
    "These trainings did not come out as expected: see the shares of the digits in the table."
)


def quickstart(
    out: Annotated[
        Path, typer.Option(help="Output folder, or a quickstart's folder to continue.")
    ] = Path("runs/quickstart"),
    seeds: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Number of training runs per model.")
    ] = 1,
    overwrite: Overwrite = False,
) -> None:
    """Extend a model of digits with new experts, on a laptop CPU.

    Trains a plain diffusers model, converts it, trains a flow expert and a DDPM expert on new images,
    combines all three, samples and measures. Every step is an hddm command and is printed as it runs. This is
    hddm benchmark quickstart.
    """
    if not overwrite:
        refuse_other(out, BENCHMARK_FILE, "quickstart")

    optional("matplotlib", "hddm quickstart", "train")
    from hddm.benchmark.file import read_benchmark
    from hddm.benchmark.report import REPORT_FILE, tables_text
    from hddm.benchmark.run import run_benchmark
    from hddm_cli.lines import LINES

    file = read_benchmark("quickstart", seeds=f"0-{seeds - 1}")
    results = run_benchmark(
        file, out, LINES, overwrite=overwrite, shows_commands=True, headline=headline
    )
    typer.echo(f"\n{headline(results)}\n\n{tables_text(results)}\nreport: {out / REPORT_FILE}")


def headline(results: "Results") -> str:
    """What the quickstart shows, if its samples show it."""
    shares: dict[str, float] = {}
    for row in results.first:
        old = row.figure("domains.old.share")
        shares.setdefault(row.one.model, -1.0 if old is None else old.mean)
    is_so = shares["old"] > 0.9 and shares["fine-tuned"] < 0.1 and 0.3 < shares["grown"] < 0.7
    is_unchanged = all(one.equal == one.images for one in results.same)
    return results.settings.title if is_so and is_unchanged else OTHERWISE
