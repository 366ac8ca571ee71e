"""A preset by name, or a user's own file, to `BenchmarkSettings`."""

from importlib.resources import as_file
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hddm.benchmark.preset_files import preset
from hddm.benchmark.schema import BenchmarkSettings, TrainingSettings
from hddm.training.settings import ExpertSettings, RouterSettings, read_yaml
from hddm.utils.errors import HddmError, did_you_mean, words

# Mappings whose keys are fields of a kind of settings.
_TRAININGS: dict[str, type[BaseModel]] = {
    name: RouterSettings if name == "router" else ExpertSettings
    for name, field in TrainingSettings.model_fields.items()
    if field.annotation == dict[str, Any]
}


def load_settings(which: str) -> BenchmarkSettings:
    """The preset called ``which``, or the settings in the file ``which``.

    A file is meant where the name has a suffix or a folder in it. What a file names by relative paths lies
    where the command is called.

    Raises:
        HddmError: for an unknown preset, a file that cannot be read, an unknown key, with the nearest known
            one, or a value that is out of range.
    """
    found = preset(which)
    if found is None:
        return parse_settings(read_yaml(Path(which)), which)
    with as_file(found) as path:
        return parse_settings(read_yaml(path), which)


def parse_settings(content: dict[str, Any], origin: str) -> BenchmarkSettings:
    """``content`` as settings; ``origin`` names its source in errors.

    Raises:
        HddmError: as `load_settings`.
    """
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


def _check_trainings(content: dict[str, Any], origin: str) -> None:
    """Refuse an unknown key where settings of trainings are plain mappings."""
    training = content.get("training")
    given = training if isinstance(training, dict) else {}
    places = {f"training.{name}": given.get(name) for name in _TRAININGS}
    kinds = {f"training.{name}": kind for name, kind in _TRAININGS.items()}
    models = content.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if isinstance(model, dict):
            places[f"models.{index}.training"] = model.get("training")
            kinds[f"models.{index}.training"] = ExpertSettings
    for place, values in places.items():
        known = set(kinds[place].model_fields) - {"seed", "objective"}
        for key in values if isinstance(values, dict) else ():
            if key not in known and key not in ("seed", "objective"):
                raise HddmError(f"{origin}: unknown key '{place}.{key}'{did_you_mean(str(key), known)}")


def _known_at(place: list[Any]) -> list[str]:
    """Fields of the record at a place in the settings."""
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
