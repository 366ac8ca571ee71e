"""The site: markdown guides, the docstrings, and the help of every verb as the command line prints it."""

import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

import click
from sphinx.application import Sphinx
from typer.main import get_command

from hddm_cli.app import commands

project = "hddm"
copyright = "the hddm authors, Apache-2.0"
version = release = metadata.version("hddm-diffusion")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
# A name in single backticks within a docstring is a link where the reference has it.
default_role = "py:obj"
# Formulas of docstrings are not Python.
highlight_language = "none"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
# "--out" is an option, and no dash.
smartquotes = False
html_theme = "furo"
html_title = f"hddm {release}"
html_show_sphinx = False
html_copy_source = False


class _Markdown(click.HelpFormatter):
    """Help as markdown in place of columns, so that it can be read on a phone."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write(f"```text\n{prog} {args}\n```\n\n")

    def write_heading(self, heading: str) -> None:
        self.write(f"**{heading}**\n\n")

    def write_text(self, text: str) -> None:
        self.write(_plain(text) + "\n\n")

    def write_dl(self, rows: Sequence[tuple[str, str]], *widths: int, **more: int) -> None:
        for term, text in rows:
            self.write(f"`{term}`\n: {_plain(text)}\n\n")


def _plain(text: str) -> str:
    """The text itself, whatever markdown would make of its signs."""
    return re.sub(r"([\\`*_<\[])", r"\\\1", text)


def _verbs(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its full name."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name, one in below.items():
        yield from _verbs(one, f"{path} {name}")


def _keep_figures_together(_: Sphinx, page: str, source: list[str]) -> None:
    """Let no line end within a figure like 12.8 ± 3.5 (s 2.3), but before its bracket."""
    source[0] = re.sub(r"(?<=\d) ± (?=\d)", "\u00a0±\u00a0", source[0]).replace("(s ", "(s\u00a0")


def _add_help(_: Sphinx, page: str, source: list[str]) -> None:
    """Append the help of every verb to the page that is for it."""
    if page != "reference/cli":
        return
    for name, command in _verbs(get_command(commands), "hddm"):
        formatter = _Markdown()
        command.format_help(click.Context(command, info_name=name), formatter)
        source[0] += f"\n## {name}\n\n{formatter.getvalue()}"


def _keep_formulas(
    _: Sphinx, kind: str, name: str, thing: object, options: Any, lines: list[str]
) -> None:
    """Show indented paragraphs of a docstring as they stand, not as quotations that are filled anew."""
    # In a call, ** opens no bold text; what is in backticks stays as it is.
    lines[:] = [
        re.sub(r"(`[^`]+`)|\*\*(?=\w+\))", lambda m: m[1] or r"\*\*", line) for line in lines
    ]
    for at in range(len(lines) - 1, 1, -1):
        opens = lines[at].startswith("    ") and not lines[at - 1].strip()
        above = lines[at - 2]
        if opens and above.strip() and not above.startswith(" ") and not above.endswith("::"):
            lines[at:at] = ["::", ""]


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_help)
    app.connect("source-read", _keep_figures_together)
    # The help depends on code that Sphinx does not watch.
    app.connect("env-get-outdated", lambda *_: ["reference/cli"])
    # Before napoleon, which takes indentation for its own.
    app.connect("autodoc-process-docstring", _keep_formulas, priority=400)
