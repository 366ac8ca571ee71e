"""Chat templates of tokenizers, which write a prompt as one turn of a chat; hddm runs one of its own.

A template is a program (Jinja) in a file of the tokenizer. Of the file's program this is asked alone: whether
it writes a prompt as `TEMPLATE` does, as the templates of Qwen3 do:

    <|im_start|>user
    PROMPT<|im_end|>
    <|im_start|>assistant

To find out, it writes a few short texts in Jinja's sandbox, after a check that all it can do is bounded: it
loops over the one message alone, no text grows by being assigned again, and it calls a few methods of texts.
A program that can do more, or that writes anything else, is refused. Prompts are written by `TEMPLATE`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hddm.utils.errors import HddmError, one_line
from hddm.utils.files import inside, read_whole

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What writes prompts, in place of the template of a file."""
_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"
_KEY = "chat_template"
_LONGEST = 20_000
"""Characters of a template; that of Qwen3 has 4,200."""
_ASKED = {"add_generation_prompt": True, "enable_thinking": True}
_TEXTS = ("a cat", "", " two\nlines ", "<tool_response>a</tool_response>", "<think>a</think> b")
_NODES = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign),
    *(nodes.Name, nodes.NSRef, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Slice),
    *(nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Test, nodes.CondExpr),
    *(nodes.Filter, nodes.Call, nodes.Keyword, nodes.Add, nodes.Sub, nodes.Neg),
)
_NAMES = {"messages", "tools", "namespace", *_ASKED}
"""Variables that a template may read besides its own."""
_FILTERS = ("length", "first", "last", "trim", "tojson")
_METHODS = ("split", "strip", "lstrip", "rstrip", "startswith", "endswith")
_CALLS = "tool_calls"
"""Attribute of a message that a template may loop over; the message of a prompt has none."""


def has_template(folder: Path, config: Mapping[str, Any]) -> bool:
    """True if the tokenizer in ``folder``, of this ``config``, has a chat template.

    Raises `HddmError` for one that writes a prompt otherwise than `TEMPLATE`, or could do anything else.
    """
    found = list(_templates(folder, config))
    for place, template in found:
        problem = _problem(template)
        if problem:
            raise HddmError(
                f"{place}: its chat template {problem}; put the one of Qwen3 there, which this text encoder "
                "was trained with"
            )
    return bool(found)


def _templates(folder: Path, config: Mapping[str, Any]) -> Iterable[tuple[Path, object]]:
    """All templates of a tokenizer, whichever of them transformers would take, with their files."""
    stated = config.get(_KEY)
    if stated is not None:
        yield folder / "tokenizer_config.json", stated
    files = [folder / _FILE]
    if (folder / _FOLDER).is_dir():
        files += sorted((folder / _FOLDER).glob("*.jinja"))
    for path in files:
        if path.exists():
            whole = inside(folder, path.relative_to(folder).as_posix())
            # A letter takes up to four bytes.
            yield path, read_whole(whole, 4 * _LONGEST).decode(errors="replace")


def _problem(template: object) -> str:
    """What is wrong with a template, in words; empty for none."""
    if not isinstance(template, str):
        return f"is no text, but {one_line(template, 60)}"
    if len(template) > _LONGEST:
        return f"has {len(template):,} characters, of {_LONGEST:,} at most"
    try:
        own = Environment(trim_blocks=True, lstrip_blocks=True).parse(template)
        odd = _unbounded(own)
        if odd:
            return f"is no known one: it {odd}"
        return _difference(template)
    except Exception as error:  # Jinja raises anything for a broken template
        return f"cannot be read ({one_line(error, 200)})"


def _difference(template: str) -> str:
    """How a checked template writes a prompt otherwise than `TEMPLATE`, in words; empty if it does not."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    own, theirs = made.from_string(TEMPLATE), made.from_string(template)
    for text in _TEXTS:
        messages = [{"role": "user", "content": text}]
        written = theirs.render(messages=messages, tools=None, **_ASKED)
        expected = own.render(messages=messages, **_ASKED)
        if written != expected:
            found, wanted = one_line(repr(written), 80), one_line(repr(expected), 80)
            return f"writes {text!r} as {found}, and not as {wanted}"
    return ""


def _unbounded(tree: nodes.Template) -> str:
    """What a template does that is not bounded by its length, in words; empty for nothing."""
    for node in _all_in(tree):
        if not isinstance(node, _NODES):
            return f"has {type(node).__name__}"
        problem = _problem_of(node)
        if problem:
            return problem
    # Last, as Jinja computes constants to find names. Of one that one branch of a condition assigns, and
    # another one reads, it is not sure.
    own = {one.name for one in tree.find_all(nodes.Name) if one.ctx == "store"}
    unknown = sorted(meta.find_undeclared_variables(tree) - _NAMES - own)
    return f"reads {one_line(unknown[0], 60)}" if unknown else ""


def _all_in(tree: nodes.Node) -> Iterable[nodes.Node]:
    yield tree
    yield from tree.find_all(nodes.Node)


def _problem_of(node: nodes.Node) -> str:
    """The same for one node, without those inside of it."""
    match node:
        case nodes.For():
            if not _is_of_one_message(node.iter) or node.test or node.recursive:
                return "loops over something else than its messages"
            return _renames(node.target)
        case nodes.Assign():
            inner = list(_all_in(node.node))
            if any(isinstance(one, nodes.Add) or _is_quoting(one) for one in inner):
                return "assigns a text that it makes longer"
            return _renames(node.target)
        case nodes.Filter():
            if node.name not in _FILTERS:
                return f"uses {one_line(node.name, 60)}"
            if _is_quoting(node) and any(map(_is_quoting, node.find_all(nodes.Filter))):
                return "quotes a text more than once"
        case nodes.Keyword(key=name) | nodes.NSRef(attr=name):
            return f"sets {name}" if name == _CALLS else ""
        case nodes.Call():
            called = node.node
            is_method = isinstance(called, nodes.Getattr) and called.attr in _METHODS
            is_namespace = isinstance(called, nodes.Name) and called.name == "namespace"
            if not is_method and not is_namespace:
                return f"calls something else than {', '.join(_METHODS)}"
    return ""


def _is_quoting(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Filter) and node.name == "tojson"


def _is_of_one_message(node: nodes.Node) -> bool:
    """True for what has one entry at most, of one prompt."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == _CALLS
    return isinstance(node, nodes.Name) and node.name in ("messages", "tools")


def _renames(target: nodes.Node) -> str:
    names = [one.name for one in _all_in(target) if isinstance(one, nodes.Name)]
    taken = sorted(_NAMES.intersection(names))
    return f"assigns {taken[0]}" if taken else ""
