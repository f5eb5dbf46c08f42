"""The shape of the source: short functions, unique module names."""

import ast
from collections import Counter
from pathlib import Path

import grimp

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


def test_packages_import_each_other_in_no_cycle() -> None:
    graph = grimp.build_graph("pfedla", exclude_type_checking_imports=True)
    packages = {path.parent.name for path in FILES if path.parent != SOURCE}
    for package in packages:
        graph.squash_module(f"pfedla.{package}")
    for package in packages:
        upstream = graph.find_upstream_modules(f"pfedla.{package}") - {"pfedla"}
        for other in upstream:
            assert f"pfedla.{package}" not in graph.find_upstream_modules(other), f"{package} and {other}"
