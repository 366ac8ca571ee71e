"""Print what hddm can say to a user, with file and line, to be read in one sitting.

These are all texts of three words or more in the code, but for docstrings and help. Paths narrow them down:
``python -m benchmarks.messages hddm/data cli``.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

HELP = {"help", "description", "epilog"}


def texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of all strings under ``node``; a formatted one is whole, with its values in braces."""
    if isinstance(node, ast.keyword) and node.arg in HELP:
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.JoinedStr):
        yield node.lineno, "".join(_part(value) for value in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def _part(value: ast.expr) -> str:
    return value.value if isinstance(value, ast.Constant) else f"{{{ast.unparse(value.value)}}}"


if __name__ == "__main__":
    for root in sys.argv[1:] or ["hddm", "cli"]:
        for path in sorted(Path(root).rglob("*.py")):
            for line, text in texts(ast.parse(path.read_text())):
                if len(text.split()) > 2:
                    print(f"{path}:{line}: {' '.join(text.split())}")
