"""The README keeps its word: its Python runs, its commands exist."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from hddm.training.settings import KINDS
from hddm_cli.app import commands

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
SHELL = re.findall(r"^\s*(?:\$ )?(hddm [a-z].*)$", TEXT, re.MULTILINE)


def test_there_is_something_to_try() -> None:
    assert PYTHON
    assert SHELL


def test_it_names_the_keys_that_only_a_run_file_has_with_their_defaults() -> None:
    root = get_command(commands)
    verbs = [root.commands["train"].commands[name] for name in ("expert", "all", "router")]
    options = {one.name for verb in (*verbs, root.commands["distill"]) for one in verb.params}
    fields = {name: one for kind in KINDS for name, one in kind.model_fields.items() if name not in options}
    assert fields
    (told,) = re.findall(r"[Oo]nly a run file has (.*?)\.\n", TEXT, re.DOTALL)
    assert dict(re.findall(r"`(\w+)` \(([\d.]+)\)", told)) == {
        name: str(one.default) for name, one in fields.items()
    }


@pytest.mark.parametrize("block", PYTHON)
def test_its_python_runs_as_it_stands(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("line", SHELL)
def test_its_commands_and_options_exist(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    command = get_command(commands)
    while known_verbs := getattr(command, "commands", None):
        verb = words.pop(0)
        assert verb in known_verbs
        command = known_verbs[verb]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
