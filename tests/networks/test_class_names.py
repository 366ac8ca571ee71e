"""Classes of networks are named in one place, so that a new kind of network is one file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hddm.networks.encoders import ALONE, VAES
from hddm.networks.families import families, pipelines, text_encoders, tokenizers
from hddm.networks.families.former import _FORMER

ROOT = Path(__file__).parents[2]
FAMILIES = ROOT / "hddm" / "networks" / "families"
ENCODERS = ROOT / "hddm" / "networks" / "encoders.py"
NETWORKS = ROOT / "hddm" / "networks"
VAE_TYPES = NETWORKS / "vae_types.py"
"""For annotations. It is imported where VAEs are, and families are imported without it."""
DEFINITIONS = {NETWORKS / "transformers.py", NETWORKS / "programs" / "network.py"}
"""Where our own networks are defined."""
OF_FAMILIES = {*families(), *pipelines(), _FORMER}
OF_ENCODERS = {*VAES, *text_encoders(), *tokenizers()}
SHARED = {*VAES}
"""Those that are not of one family alone."""
for kind in ALONE:
    SHARED.update((*kind.names, *kind.tokenizer.names))
FILES = sorted(path for folder in ("hddm", "cli") for path in (ROOT / folder).rglob("*.py"))


def _words(tree: ast.Module) -> Iterator[str]:
    """Names and words in texts of a module, without its docstrings."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.value)
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                yield node.id
            case ast.Attribute():
                yield node.attr
            case ast.alias():
                yield node.name
            case ast.Constant(value=str()) if node not in docstrings:
                yield from re.findall(r"\w+", node.value)


def _named_in(path: Path, names: set[str]) -> set[str]:
    return names.intersection(_words(ast.parse(path.read_text())))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_class_of_networks_is_named_where_its_family_is(path: Path) -> None:
    is_family = path.parent == FAMILIES
    if path not in DEFINITIONS and not is_family:
        assert _named_in(path, OF_FAMILIES) == set()
    if path not in (ENCODERS, VAE_TYPES) and not is_family:
        assert _named_in(path, OF_ENCODERS) == set()


def test_the_test_finds_names_of_classes() -> None:
    named = set().union(*(_named_in(path, OF_FAMILIES) for path in FAMILIES.glob("*.py")))
    assert named >= OF_FAMILIES
    assert _named_in(ENCODERS, OF_ENCODERS) == SHARED
    assert SHARED < OF_ENCODERS
    assert _named_in(ENCODERS, {"diffusers"}) == set()
