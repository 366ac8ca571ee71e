"""Choosing and confirming: which seeds and which images a start of a benchmark is scored on.

Settings are chosen on ``seeds`` and validation images. Then they are frozen, in the file, and confirmed once,
on ``confirmation_seeds`` and held-out images. One of the file's ``seeds`` is refused for confirming.
"""

from hddm.benchmark.load_settings import parse_settings
from hddm.benchmark.schema import BenchmarkSettings
from hddm.benchmark.seeds import parse_seeds
from hddm.utils.errors import HddmError


def chosen(
    settings: BenchmarkSettings, seeds: str | None = None, held_out: bool = False, workers: int | None = None
) -> BenchmarkSettings:
    """``settings`` as one start of the benchmark asks for them.

    Args:
        settings: of the file.
        seeds: instead of the file's, as `parse_seeds`.
        held_out: confirm, on held-out images; by default with the confirmation seeds.
        workers: instead of the file's.

    Raises:
        HddmError: for seeds that chose settings where ``held_out`` is to confirm them, or none to confirm on;
            and for seeds that are kept for confirming where settings are chosen.
    """
    changes: dict[str, object] = {}
    both = sorted(set(settings.seeds) & set(settings.confirmation_seeds))
    if both:
        raise HddmError(
            f"{settings.name}: seed {both[0]} is among seeds and confirmation_seeds; name it in one"
        )
    # A file that says so confirms as the option does.
    held_out = held_out or settings.score_on == "held-out"
    if workers is not None:
        changes["workers"] = workers
    wanted = None if seeds is None else parse_seeds(seeds, "--seeds ")
    if held_out and settings.data.validation_share:
        wanted = wanted or settings.confirmation_seeds
        if not wanted:
            raise HddmError("--held-out: the settings name no confirmation_seeds; give fresh ones by --seeds")
        used = sorted(set(wanted) & set(settings.seeds))
        if used:
            raise HddmError(
                f"--held-out --seeds {','.join(map(str, wanted))}: seed {used[0]} is one that settings are "
                f"chosen on ({', '.join(map(str, settings.seeds))}); confirm on others"
            )
    kept = sorted(set(wanted or ()) & set(settings.confirmation_seeds))
    if kept and not held_out:
        raise HddmError(
            f"--seeds {','.join(map(str, wanted or ()))}: seed {kept[0]} is kept for confirming "
            "(confirmation_seeds); choose on others"
        )
    if held_out:
        changes["score_on"] = "held-out"
    if wanted:
        changes["seeds"] = wanted
    return parse_settings(settings.model_dump(mode="json") | changes, settings.name)
