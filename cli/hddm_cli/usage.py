"""Wrong usage in one line: the option, the value, and what may stand there.

Typer brings its own copy of click, or does not, by its version; so its errors are known by what they hold.
"""

import re
from typing import Any

from hddm.utils.errors import choose, did_you_mean, words


def wording(error: Any) -> str | None:
    """The line for a failure of the command line's parser, None for any other error."""
    if not hasattr(error, "format_message"):
        return None
    context: Any = getattr(error, "ctx", None)
    verb = context.command_path if context else "hddm"
    if hasattr(error, "option_name"):
        return _of_option(error, verb)
    if hasattr(error, "param"):
        return _of_value(error, verb)
    unknown = re.search(r"No such command '(.*?)'", error.message)
    if unknown:
        return f"{unknown[1]} is no verb of {verb}; {choose(unknown[1], list(context.command.commands))}"
    return f"{_sentence(error.message)}; {verb} --help shows what it takes"


def _of_option(error: Any, verb: str) -> str:
    option = error.option_name
    if not hasattr(error, "possibilities"):
        return f"{option}: {_sentence(error.message).removeprefix(f'option {option!r} ')}"
    known = [name for one in error.ctx.command.params for name in (*one.opts, *one.secondary_opts)]
    nearest = did_you_mean(option, known) or f"; {verb} --help lists what there is"
    return f"{option}: no such option of {verb}{nearest}"


def _of_value(error: Any, verb: str) -> str:
    param = error.param
    name = param.opts[0] if param.param_type_name == "option" else (param.metavar or param.name).upper()
    if hasattr(error, "param_type"):
        return f"{name} is required; {verb} --help says what it is"
    chosen = re.search(r"'(.*?)' is not one of (.+?)\.?$", error.message)
    if chosen:
        known = re.findall(r"'([^']*)'", chosen[2])
        return f"{name} {chosen[1]}: {choose(chosen[1], known)}"
    problems = error.__cause__.errors() if hasattr(error.__cause__, "errors") else []
    if problems:
        return f"{name} {problems[0]['input']}: {words(problems[0])}"
    return f"{name}: {_sentence(error.message)}"


def _sentence(message: str) -> str:
    """As a part of a line: no capital at its beginning, no full stop at its end."""
    text = " ".join(message.split()).removesuffix(".")
    return text[:1].lower() + text[1:]
