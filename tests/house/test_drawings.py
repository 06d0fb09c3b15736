"""The drawing at the top of a member's ``__init__`` names functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEMBERS = sorted(path.parent for path in ROOT.glob("*/src/scalerl_*/__init__.py"))
DRAWN = {
    f"scalerl_{name}"
    for name in (
        "analysis",
        "api",
        "cli",
        "coordinator",
        "curvefit",
        "extras",
        "generator",
        "lifecycle",
        "operator",
        "processes",
        "tasks",
        "trainer",
    )
}
CALL = re.compile(r"(?<![\w.])(?:(\w+)\.)?(\w+)\(")


def names(member: Path) -> tuple[set[str], dict[str, set[str]]]:
    """Functions and classes of a member, and what each class or module of it defines."""
    defined: set[str] = set()
    scopes: dict[str, set[str]] = {}
    for path in member.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for scope, name in [(tree, path.stem)] + [
            (n, n.name) for n in ast.walk(tree) if isinstance(n, ast.ClassDef)
        ]:
            inside = {
                n.name
                for n in scope.body
                if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            }
            scopes.setdefault(name, set()).update(inside)
            defined |= inside
    return defined, scopes


@pytest.mark.parametrize("member", MEMBERS, ids=lambda path: path.name)
def test_drawing_names_existing_functions(member: Path) -> None:
    drawing = ast.get_docstring(ast.parse((member / "__init__.py").read_text())) or ""
    drawing = re.sub(r"(?m)^ *(>>>|\.\.\.).*", "", drawing)
    calls = CALL.findall(re.sub(r"(?<=[\s,])\.(\w+\()", r"\1", drawing))  # ", .offer()" continues a list
    assert calls or member.name not in DRAWN
    defined, scopes = names(member)
    wrong = [
        f"{scope}.{name}" if scope else name
        for scope, name in calls
        if name not in scopes.get(scope, defined)
    ]
    assert not wrong, f"{member.name} has no such function: {wrong}"
