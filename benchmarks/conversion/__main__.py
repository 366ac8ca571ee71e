"""``python -m benchmarks.conversion <question>``: see ``--help``."""

import typer

from benchmarks.harness import RESULTS, ResultsOption, SeedsOption, Start, main

app = typer.Typer(help="How exact the conversion is.", no_args_is_help=True, add_completion=False)


@app.command()
def fidelity(results: ResultsOption = RESULTS, seeds: SeedsOption = 3) -> None:
    """Velocity error over t of the exact conversion and of what is done without it."""
    from benchmarks.conversion.fidelity import measure_fidelity

    typer.echo(measure_fidelity(Start(results, seeds=seeds)))


@app.command()
def azula(results: ResultsOption = RESULTS, seeds: SeedsOption = 3) -> None:
    """Velocity error over t, ours and azula's, against closed forms; needs azula."""
    from benchmarks.conversion.azula import measure_azula

    typer.echo(measure_azula(Start(results, seeds=seeds)))


if __name__ == "__main__":
    main(app)
