"""Settings of a benchmark by the name of a preset or from a user's own file, as one start asks for them.

Settings are chosen on ``seeds`` and validation images. Then they are frozen, in the file, and confirmed once,
on ``confirmation_seeds`` and held-out images.
"""

from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from hddm.utils.errors import HddmError, UsageError, choose, did_you_mean, words

if TYPE_CHECKING:
    from hddm.benchmark.settings import BenchmarkSettings

# The schema needs torch, so it is imported where a file is read: an unknown preset is refused before.
_PRESETS = files("hddm.benchmark") / "presets"
_SUFFIX = ".yaml"
_OF_BENCHMARK = ("seed", "objective")


def preset_names() -> list[str]:
    """Names of the presets, in order."""
    names = [path.name for path in _PRESETS.iterdir()]
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


def preset(which: str) -> Traversable | None:
    """The file of the preset called ``which``; None where a file of the user's own is meant.

    That is so where the name has a suffix or a folder in it.

    Raises:
        UsageError: for an unknown preset.
    """
    if "/" in which or Path(which).suffix:
        return None
    if which not in preset_names():
        raise UsageError(
            f"{which}: no such preset; name a file of your own by its path, as ./mine.yaml, or "
            f"{choose(which, preset_names())}"
        )
    return _PRESETS / f"{which}{_SUFFIX}"


def load_settings(which: str) -> "BenchmarkSettings":
    """The preset called ``which``, or the settings in the file ``which``.

    Relative paths in a file are relative to the working directory.

    Raises:
        HddmError: for an unknown preset, a file that cannot be read, an unknown key, with the nearest known
            one, or a value that is out of range.
    """
    from hddm.training.settings import read_yaml

    found = preset(which)
    if found is None:
        return parse_settings(read_yaml(Path(which)), which)
    with as_file(found) as path:
        return parse_settings(read_yaml(path), which)


def parse_settings(content: dict[str, Any], origin: str) -> "BenchmarkSettings":
    """``content`` as settings; ``origin`` names its source in errors.

    Raises:
        HddmError: as `load_settings`.
    """
    from hddm.benchmark.settings import BenchmarkSettings

    _check_trainings(content, origin)
    try:
        return BenchmarkSettings.model_validate(content)
    except ValidationError as error:
        errors = error.errors()
        # A misspelt key is missing too, and its name as it stands says more.
        first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
        place = [part for part in first["loc"] if part != "function-after"]
        key = ".".join(map(str, place))
        if first["type"] == "extra_forbidden":
            nearest = did_you_mean(str(place[-1]), _known_at(place[:-1]))
            raise HddmError(f"{origin}: unknown key {key!r}{nearest}") from error
        plain = isinstance(first["input"], str | int | float)
        value = f" (is {first['input']!r})" if plain and first["type"] != "missing" else ""
        named = f"key {key!r}{value}: " if key else ""
        raise HddmError(f"{origin}: {named}{words(first)}") from error


def chosen(
    settings: "BenchmarkSettings",
    seeds: str | None = None,
    held_out: bool = False,
    workers: int | None = None,
) -> "BenchmarkSettings":
    """``settings`` as one start of the benchmark asks for them.

    Args:
        settings: of the file.
        seeds: instead of the file's, as `hddm.benchmark.settings.parse_seeds`.
        held_out: confirm, on held-out images; by default with the confirmation seeds.
        workers: instead of the file's.

    Raises:
        HddmError: for seeds that chose settings where ``held_out`` is to confirm them, or none to confirm on;
            and for seeds that are kept for confirming where settings are chosen.
    """
    from hddm.benchmark.settings import parse_seeds

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


def _check_trainings(content: dict[str, Any], origin: str) -> None:
    """Refuse an unknown key where settings of trainings are plain mappings."""
    from hddm.benchmark.settings import TrainingSettings
    from hddm.training.settings import ExpertSettings, RouterSettings

    training, models = content.get("training"), content.get("models")
    places: list[tuple[str, Any, type[BaseModel]]] = [
        (
            f"training.{name}",
            training.get(name) if isinstance(training, dict) else None,
            RouterSettings if name == "router" else ExpertSettings,
        )
        for name, field in TrainingSettings.model_fields.items()
        if field.annotation == dict[str, Any]
    ]
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if isinstance(model, dict):
            places.append((f"models.{index}.training", model.get("training"), ExpertSettings))
    for place, values, kind in places:
        known = set(kind.model_fields) - set(_OF_BENCHMARK)
        for key in values if isinstance(values, dict) else ():
            if key not in known and key not in _OF_BENCHMARK:
                raise HddmError(f"{origin}: unknown key '{place}.{key}'{did_you_mean(str(key), known)}")


def _known_at(place: list[Any]) -> list[str]:
    """Fields of the record at a place in the settings."""
    from hddm.benchmark.settings import BenchmarkSettings

    record: Any = BenchmarkSettings
    for part in place:
        if isinstance(part, str) and part in getattr(record, "model_fields", {}):
            record = record.model_fields[part].annotation
        found = [one for one in (record, *get_args(record)) if _is_record(one)]
        # Of Annotated[tuple[Record, ...], …], what is inside.
        found += [one for outer in get_args(record) for one in get_args(outer) if _is_record(one)]
        record = found[0] if found else record
    return list(getattr(record, "model_fields", ()))


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
