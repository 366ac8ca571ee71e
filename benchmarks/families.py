"""``python -m benchmarks.families``: write the table of pipelines in the guide to conversion.

Its rows are made from the families of networks, so a new one is in the guide as soon as it is in the code.
"""

import inspect
from pathlib import Path

from hddm.checkpoints.single_files import file_layouts
from hddm.condition_names import LABELS
from hddm.networks.encoders import CLIP, T5, TextEncoderClass
from hddm.networks.families import families
from hddm.networks.families.family import Family, Pipeline, Taken

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "convert.md"
_BEGIN, _END = "<!-- by python -m benchmarks.families -->\n", "<!-- end of the table -->\n"
_HEAD = "| pipeline | its network | prompts by | guidance | single file |\n|---|---|---|---|---|\n"


def main() -> None:
    """Write the table."""
    GUIDE.write_text(with_table(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
    print(GUIDE)


def with_table(guide: str) -> str:
    """The text of the guide with today's table."""
    before, rest = guide.split(_BEGIN)
    _, after = rest.split(_END)
    return before + _BEGIN + table() + _END + after


def table() -> str:
    """A row per pipeline of diffusers around a network of a known family."""
    files: dict[str, list[str]] = {}
    for layout in file_layouts().values():
        files.setdefault(layout.family.name, []).append(f"`{layout.name}`")
    rows = []
    for family in families().values():
        for pipeline in family.pipelines:
            layouts = files.get(family.name, []) if pipeline.has_single_file else []
            cells = [
                f"`{pipeline.name}`",
                f"`{family.name}`",
                prompts_by(family, pipeline),
                _guidance(family, pipeline),
                ", ".join(layouts),
            ]
            rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(sorted(rows))


def prompts_by(family: Family, pipeline: Pipeline) -> str:
    """What a prompt becomes: the text encoders that read it, as messages call them, or a class."""
    if not pipeline.has_text:
        return "a class" if LABELS in _taken(family).conditions else "none, or a class"
    if pipeline.prompts is not None:
        kinds: tuple[TextEncoderClass, ...] = pipeline.prompts.encoders
    else:
        kinds = (CLIP,) if pipeline.t5_tokens is None else (T5,)
    return ", ".join(kind.label for kind in kinds)


def _guidance(family: Family, pipeline: Pipeline) -> str:
    if "guidance" in family.settings:
        return "embedded, or by a negative prompt"
    if pipeline.has_text:
        return "by a negative prompt"
    return "by the class that stands for none" if _taken(family).null_class is not None else ""


def _taken(family: Family) -> Taken:
    """The conditions of a network with the arguments that its class assumes."""
    arguments = {}
    for name, argument in inspect.signature(family.network.__init__).parameters.items():
        if argument.default is not argument.empty:
            arguments[name] = argument.default
    return family.conditions(arguments)


if __name__ == "__main__":
    main()
