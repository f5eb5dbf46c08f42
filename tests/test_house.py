"""The shape of the source: short functions, unique module names."""

import ast
from collections import Counter
from pathlib import Path

import pfedla

SOURCE = Path(pfedla.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def test_no_function_has_more_than_sixty_lines() -> None:
    long = {
        f"{path.relative_to(SOURCE)}:{node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 60
    }
    assert not long


def test_module_names_are_unique() -> None:
    names = Counter(path.stem for path in FILES if not path.stem.startswith("__"))
    assert not [name for name, count in names.items() if count > 1]
