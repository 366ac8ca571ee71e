"""Run files: settings in YAML, checked key by key, for what stays the same between runs.

    size: S/2
    batch_size: 256
    learning_rate: 1e-4
    mixed_precision: bf16
    checkpoint_every: 1000

Keys are those of the settings of what is trained and of `hddm.training.run_folder.Keeping`.
"""

from collections.abc import Hashable, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hddm.errors import HddmError, did_you_mean
from hddm.facts import OPTIONS, Facts, parse_facts
from hddm.training.settings import DistillSettings, ExpertSettings, Keeping, RouterSettings, RunOptions

Settings = TypeVar("Settings", bound=Facts)
LARGEST = 2**20
# A file may serve several verbs: what one of them knows is no mistake.
KINDS: tuple[type[Facts], ...] = (Keeping, ExpertSettings, RouterSettings, DistillSettings)


def settings_of(
    record: type[Settings], path: Path | None, values: Mapping[str, Any], explicit: Set[str]
) -> Settings:
    """Settings of a kind, from options and a run file.

    Args:
        record: the kind.
        path: the run file, if there is one.
        values: options by name, defaults and all.
        explicit: names of those that were given, which override the file.

    Raises:
        HddmError: for a file that cannot be read or is no mapping, a key that no kind has, naming the nearest
            known one, or a value that is out of range.
    """
    if path is None:
        return parse_facts(dict(values), record, OPTIONS)
    content = read_run_file(path, record)
    mine = {key: value for key, value in content.items() if key in record.model_fields}
    parse_facts(_complete(record, mine, values), record, str(path))
    weaker = {name: value for name, value in values.items() if name not in explicit}
    stronger = {name: values[name] for name in explicit}
    return parse_facts(weaker | mine | stronger, record, OPTIONS)


def read_run_file(path: Path, record: type[Facts]) -> dict[str, Any]:
    """The keys of a run file, all of them known to ``record`` or to another kind of settings.

    Raises:
        HddmError: as `settings_of`.
    """
    content = read_yaml(path)
    once = set(RunOptions.model_fields) - set(Keeping.model_fields)
    known = {name for kind in (record, *KINDS) for name in kind.model_fields} - once
    for key in content:
        if key in once:
            raise HddmError(
                f"{path}: {key} is said for one start, as --{str(key).replace('_', '-')}; remove it"
            )
        if key not in known:
            raise HddmError(f"{path}: unknown key {key!r}{did_you_mean(str(key), known)}")
    return content


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file of settings; an empty file is an empty one.

    Raises:
        HddmError: for a file that cannot be read, is no YAML or no mapping, or names a key twice.
    """
    try:
        text = path.read_bytes()
        if len(text) > LARGEST:
            raise HddmError(f"{path}: has {len(text)} bytes; a run file has a few lines")
        content = yaml.load(text.decode(), Loader=_Loader)
    except OSError as error:
        raise HddmError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HddmError(f"{path}: is no YAML ({_reason(error)})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise HddmError(f"{path}: holds no settings; write them as 'key: value', a line each")
    return content


def _reason(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """What is wrong with a text and where, without the name that YAML makes up for it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        what = ", ".join(filter(None, (error.context, error.problem)))
        return f"line {mark.line + 1}, column {mark.column + 1}: {what}"
    return str(getattr(error, "reason", error))


class _Loader(yaml.SafeLoader):
    """Plain values only; a key that comes twice is refused, where YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _complete(record: type[Facts], mine: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``mine`` with what a file need not say, so that a bad value is told as the file's."""
    required = {name for name, one in record.model_fields.items() if one.is_required()}
    return {name: values[name] for name in required if name in values} | mine
