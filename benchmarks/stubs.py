"""``python -m benchmarks.stubs``: write ``hddm/__init__.pyi``, the types of hddm's keywords.

Functions such as `hddm.train` take the fields of their settings as keywords, which type checkers and editors
cannot see in their source. The stub spells them out, and is made from the same records.
"""

import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, ByteSize

import hddm

STUB = Path(hddm.__file__).with_suffix(".pyi")
HEAD = '''"""Types of the package for type checkers and editors, by ``python -m benchmarks.stubs``."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

'''
KEYWORDS = ("assemble", "convert", "evaluate", "partition", "sample_to_folder", "train")
"""Functions that take the fields of records as keywords."""


def main() -> None:
    """Write the stub."""
    STUB.write_text(stub(), encoding="utf-8")
    print(STUB)


def stub() -> str:
    """Text of the stub."""
    homes = hddm._HOMES
    imports = {("hddm.utils.errors", "HddmError")}
    functions = []
    for name in sorted(homes):
        if name in KEYWORDS:
            functions.append(_function(getattr(hddm, name), imports))
        else:
            imports.add((homes[name], name))
    lines = [f"from {module} import {name} as {name}\n" for module, name in sorted(imports)]
    return "".join(
        [
            HEAD,
            "from hddm import schedules as schedules\n",
            *lines,
            "\nPathText = str | PathLike[str]\n",
            *functions,
        ]
    )


def _function(function: Callable[..., Any], imports: set[tuple[str, str]]) -> str:
    """A function's declaration; what its types need is added to ``imports``."""
    signature = inspect.signature(function)
    parameters = list[str]()
    is_positional = True
    for name, one in signature.parameters.items():
        if is_positional and one.kind is inspect.Parameter.KEYWORD_ONLY:
            parameters.append("*")
            is_positional = False
        kind = _taken(one.annotation, imports)
        default = "" if one.default is inspect.Parameter.empty else f" = {_default(one.default)}"
        parameters.append(f"{name}: {kind}{default}")
    returned = _named(signature.return_annotation, imports)
    listed = "".join(f"    {one},\n" for one in parameters)
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    return f'\ndef {function.__name__}(\n{listed}) -> {returned}:\n    """{summary}"""\n'


def _default(value: Any) -> str:
    is_plain = value is None or isinstance(value, bool | int | float | str | tuple)
    text = json.dumps(value) if isinstance(value, str) else repr(value)
    return text if is_plain else "..."


def _taken(kind: Any, imports: set[tuple[str, str]]) -> str:
    """What a parameter takes: any path may be text, any list a sequence."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is None or kind is type(None):
        return "None"
    if origin is Annotated:
        base = _taken(arguments[0], imports)
        reads_text = any(isinstance(one, BeforeValidator) for one in arguments[1:])
        return f"{base} | str" if reads_text and "str" not in base else base
    if kind is Path:
        return "PathText"
    if kind is ByteSize:
        return "int | str"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_taken(one, imports) for one in arguments))
    if origin is Literal:
        return f"Literal[{', '.join(map(json.dumps, arguments))}]"
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"tuple[{', '.join(_taken(one, imports) for one in arguments)}]"
    if origin in (tuple, list, Sequence):
        return f"Sequence[{_taken(arguments[0], imports)}]"
    if origin in (dict, Mapping):
        key, value = (_taken(one, imports) for one in arguments)
        return f"Mapping[{key}, {value}]"
    if origin is Callable:
        return "Callable[[str], object]"
    return _named(kind, imports)


def _named(kind: Any, imports: set[tuple[str, str]]) -> str:
    """A type by its name, imported where it is not built in."""
    if get_origin(kind) is None and isinstance(kind, type):
        if kind.__module__ not in ("builtins", "pathlib"):
            imports.add((kind.__module__, kind.__name__))
        return kind.__name__
    return str(kind).replace("pathlib.", "")


if __name__ == "__main__":
    main()
