"""Settings of one training out of several places in a file."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hddm.utils.errors import HddmError, words

Layer = tuple[str, Mapping[str, Any]]
"""A place in a file, as errors name it, and what is said there."""

AnySettings = TypeVar("AnySettings", bound=BaseModel)


def layered(kind: type[AnySettings], layers: Sequence[Layer]) -> AnySettings:
    """Settings of which each layer goes before those that it follows.

    Raises:
        HddmError: for a value that cannot be, with the last place that says it; for a missing one, with the
            first; for several that do not go together, with all.
    """
    merged: dict[str, Any] = {}
    for _, values in layers:
        merged |= values
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        problem = error.errors()[0]
        if not problem["loc"]:
            places = " and ".join(place for place, values in layers if values)
            raise HddmError(f"{places}: {words(problem)}") from error
        key = str(problem["loc"][0])
        place = next((place for place, values in reversed(layers) if key in values), layers[0][0])
        value = f" (is {merged[key]!r})" if key in merged else ""
        raise HddmError(f"key '{place}.{key}'{value}: {words(problem)}") from error
