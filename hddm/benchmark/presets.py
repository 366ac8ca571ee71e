"""Settings of a benchmark, from a preset or a user's file, with the choices of one start (`chosen`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hddm.utils.errors import HddmError, UsageError, choose
from hddm.utils.records import parse_record

if TYPE_CHECKING:
    from hddm.benchmark.settings import BenchmarkSettings

# The schema needs torch, so it is imported where a file is read: an unknown preset is refused before.
_PRESETS = Path(__file__).with_name("presets")


def preset_names() -> list[str]:
    """Names of the presets, in order."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def settings_file(which: str) -> Path:
    """The file of the preset called ``which``, or a user's own: a name with a suffix or a folder in it.

    Raises `UsageError` for an unknown preset.
    """
    if "/" in which or Path(which).suffix:
        return Path(which)
    if which not in preset_names():
        raise UsageError(
            f"{which}: no such preset; give the path of your own file, such as ./mine.yaml, or "
            f"{choose(which, preset_names())}"
        )
    return _PRESETS / f"{which}.yaml"


def load_settings(which: str) -> "BenchmarkSettings":
    """Read the preset called ``which``, or the settings in the file ``which``.

    Relative paths in a file are relative to the working directory. An unknown preset or key, an unreadable
    file, or a value out of range raises `HddmError`.
    """
    from hddm.utils.files import read_yaml

    return parse_settings(read_yaml(settings_file(which)), which)


def parse_settings(content: dict[str, Any], origin: str) -> "BenchmarkSettings":
    """Parse ``content`` as settings; ``origin`` names its source in errors. Raises as `load_settings`."""
    from hddm.benchmark.settings import BenchmarkSettings

    return parse_record(content, BenchmarkSettings, origin)


def chosen(
    settings: "BenchmarkSettings",
    seeds: str | None = None,
    held_out: bool = False,
    workers: int | None = None,
) -> "BenchmarkSettings":
    """Return ``settings`` of a file with the ``seeds`` (`parse_seeds`) and ``workers`` of one start.

    ``held_out`` confirms them on held-out images, by default with the confirmation seeds. Seeds that would
    both choose settings and confirm them, or none to confirm on, raise `HddmError`.
    """
    from hddm.benchmark.settings import parse_seeds

    confirming, frozen = set(settings.confirmation_seeds), settings.data.validation_share > 0
    both = sorted(confirming & set(settings.seeds))
    if both:
        raise HddmError(
            f"{settings.name}: seed {both[0]} is in both seeds and confirmation_seeds; remove it from one"
        )
    # A file that says so confirms as the option does.
    held_out = held_out or settings.score_on == "held-out"
    wanted = None if seeds is None else parse_seeds(seeds, "--seeds ")
    given = f"--seeds {','.join(map(str, wanted or ()))}"
    if held_out and frozen:
        wanted = wanted or settings.confirmation_seeds
        if not wanted:
            raise UsageError("--held-out: the settings have no confirmation_seeds; pass --seeds")
        used = sorted(set(wanted) & set(settings.seeds))
        if used:
            raise HddmError(
                f"--held-out {given}: seed {used[0]} is used to choose settings "
                f"({', '.join(map(str, settings.seeds))}); use others to confirm"
            )
    kept = sorted(set(wanted or ()) & confirming)
    if kept and not held_out:
        raise HddmError(
            f"{given}: seed {kept[0]} is reserved for confirmation (confirmation_seeds); use other seeds"
        )
    changes: dict[str, object] = {"score_on": "held-out"} if held_out else {}
    changes |= {"seeds": wanted} if wanted else {}
    changes |= {} if workers is None else {"workers": workers}
    return parse_settings(settings.model_dump(mode="json") | changes, settings.name)
