"""Pages that need no other file: pictures are data addresses, and one style serves all."""

import base64
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hddm.utils.progress import duration


def templates(is_html: bool, **options: Any) -> Environment:
    """Templates of the package, by their paths in it; only those of HTML escape values.

    Further ``options`` are Jinja's.
    """
    loader = PackageLoader("hddm", "")
    found = Environment(loader=loader, autoescape=is_html, undefined=StrictUndefined, **options)
    found.globals["duration"] = duration
    return found


def data_address(png: bytes) -> str:
    """The address of a PNG that stands in the page itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
