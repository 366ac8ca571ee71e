"""The line that says where figures come from."""

from collections.abc import Mapping
from typing import Any


def provenance(benchmark: str, content: Mapping[str, Any], command: str) -> str:
    """Date, command, machine, packages and seeds of what ``benchmark`` measured.

    Args:
        benchmark: its module below ``benchmarks``.
        content: the result, with "measured_on" and one of "runs" a training seed.
        command: the arguments that it was called with.
    """
    facts = content["measured_on"]
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    return (
        f"{facts['date']} · `{f'python -m benchmarks.{benchmark} {command}'.strip()}` · {facts['cores']} "
        f"cores ({facts['processor']}), no accelerator · {facts['platform']} · Python {facts['python']}, "
        f"{packages} · training seeds 0-{len(content['runs']) - 1}"
    )
