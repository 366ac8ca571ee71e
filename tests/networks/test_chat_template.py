"""Chat templates of tokenizers: which are taken, and that none of them can do anything else."""

import time
from pathlib import Path

import pytest

from hddm.networks.chat_template import TEMPLATE, has_template
from tests.artefacts import refusal
from tests.component_files import TURNS

OLDER = (
    """{%- set ns = namespace(asked=true, last=messages|length - 1) %}
{%- for one in messages %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set message = messages[index] %}
    {%- set start = '<tool_response>' %}
    {%- set length = start|length %}
    {%- set begins = message.content[:length] %}
    {%- if ns.asked and message.role == "user" and not(begins == start) %}
        {%- set ns.asked = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
"""
    + TURNS
)
"""With a loop from the last message on, by numbers and parts of texts, as that of Qwen3 had at first."""
TAKEN = {
    "own": TEMPLATE,
    "with tools": TURNS,
    "older": OLDER,
    "backwards": TURNS.replace("in messages %}", "in messages[::-1] %}"),
    "of calls": TURNS + "{%- for call in messages[0].tool_calls %}{{ call | tojson }}{%- endfor %}",
}
DOUBLED = "{% set x = 'aaaaaaaa' %}" + "{% set x = x + x %}" * 60
QUOTED = "{% set x = '\"' %}" + "{% set x = x | tojson %}" * 60
REFUSED = {
    "": "writes 'a cat' as ''",
    "{{ messages[0].content }}": "writes 'a cat' as 'a cat'",
    TEMPLATE + TEMPLATE: "writes 'a cat' as",
    "{{ '<|im_start|>system\\nYou are kind<|im_end|>\\n' }}" + TEMPLATE: "writes 'a cat' as",
    TEMPLATE.replace("message.content", "message.content.strip()"): "writes ' two\\nlines ' as",
    "{{ bos_token }}" + TEMPLATE: "reads bos_token",
    "{% include '/etc/passwd' %}": "has Include",
    "{% import '/etc/passwd' as x %}": "has Import",
    "{% extends '/etc/passwd' %}": "has Extends",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "has Macro",
    "{{ 'a' * 10**9 }}": "has Mul",
    "{{ 10 ** 10 ** 10 }}": "has Pow",
    "{{ '%1000000000d' % 1 }}": "has Mod",
    "{{ 'a' | center(1000000000) }}": "uses center",
    "{{ '{:1000000000}'.format(1) }}": "calls something else than split",
    "{{ lipsum(1000000000) }}": "calls something else than split",
    "{% for i in range(1000000000) %}{% endfor %}": "loops over something else",
    "{% for a in 'aaa' %}{% for b in 'aaa' %}{% endfor %}{% endfor %}": "loops over something else",
    "{% set messages = 'aaa' %}{% for a in messages %}{% endfor %}": "assigns messages",
    "{% set n = namespace(tool_calls='a') %}{% for a in n.tool_calls %}{% endfor %}": "sets tool_calls",
    "{% set n = namespace() %}{% set n.tool_calls = 'a' %}": "sets tool_calls",
    DOUBLED: "assigns a text that it makes longer",
    QUOTED: "assigns a text that it makes longer",
    "{{ " + "messages" + " | tojson" * 60 + " }}": "quotes a text more than once",
    "{{ ''.__class__.__mro__ }}": "is unsafe",
    "{{ messages[0].content.__init__ }}": "writes 'a cat' as ''",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "cannot be read",
    "{% if 1 %}": "cannot be read",
    "a" * 20001: "has 20,001 characters, of 20,000 at most",
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_template_that_writes_a_turn_alike_is_taken(name: str, tmp_path: Path) -> None:
    assert has_template(tmp_path, {"chat_template": TAKEN[name]})


def test_a_tokenizer_without_a_template_has_none(tmp_path: Path) -> None:
    assert not has_template(tmp_path, {"chat_template": None})


@pytest.mark.parametrize("template", REFUSED, ids=lambda one: one[:40])
def test_any_other_template_is_refused_in_one_line_and_at_once(
    template: str, tmp_path: Path
) -> None:
    start = time.process_time()
    told = refusal(has_template, tmp_path, {"chat_template": template})
    assert time.process_time() - start < 2
    assert REFUSED[template] in told
    assert "\n" not in told
    assert told.endswith("which this text encoder was trained with")


def test_several_templates_are_read_wherever_they_lie(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": TEMPLATE}]
    assert "is no text, but" in refusal(has_template, tmp_path, {"chat_template": listed})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert has_template(tmp_path, {})
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    told = refusal(has_template, tmp_path, {"chat_template": TEMPLATE})
    assert "additional_chat_templates/tool_use.jinja: its chat template writes" in told
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    (tmp_path / "outside").write_text(TEMPLATE)
    inner = tmp_path / "tokenizer"
    inner.mkdir()
    (inner / "chat_template.jinja").symlink_to(tmp_path / "outside")
    assert "outside the folder" in refusal(has_template, inner, {})


def test_files_that_are_no_template_are_left_alone_and_large_ones_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "additional_chat_templates"
    (folder / "a.jinja.d").mkdir(parents=True)
    (folder / "notes.txt").write_text("{% include 'evil' %}")
    assert not has_template(tmp_path, {})
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(2**31)
    assert "has more than 80000 bytes" in refusal(has_template, tmp_path, {})
