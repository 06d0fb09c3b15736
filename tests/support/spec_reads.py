"""Finds the spec fields that a module's source reads: attribute chains that begin at a model of the spec.

A chain begins at a parameter annotated with such a model, at ``.spec``, or at a name to which such a chain was
assigned. All fields of a section that is passed to a function count as read, unless that function's parameter is
annotated with the section's model: then only the fields that the function reads count.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from scalerl_api.edits import leaves, nested_model
from scalerl_api.spec import RunSpec


def _sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    yield model, path
    for name, field in model.model_fields.items():
        if (nested := nested_model(field.annotation)) is not None:
            yield from _sections(nested, f"{path}.{field.alias or name}".lstrip("."))


SECTIONS = list(_sections(RunSpec))
MODELS = {model.__name__: model for model, _ in SECTIONS}


class _Reads(ast.NodeVisitor):
    """Collects attribute chains in ``found``, each as (model, attribute, ...)."""

    def __init__(self, names: dict[str, tuple[str, ...]]) -> None:
        self.names = names
        self.found: set[tuple[str, ...]] = set()

    def chain(self, node: ast.AST) -> tuple[str, ...] | None:
        """The chain (model, attribute, ...) of a node; None if it does not begin at a model of the spec."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=value, attr=attribute):
                inner = self.chain(value)
                if inner is not None:
                    return (*inner, attribute)
                return ("RunSpec",) if attribute in ("spec", "_spec") else None
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = dict(self.names)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if isinstance(argument.annotation, ast.Name) and argument.annotation.id in MODELS:
                self.names[argument.arg] = (argument.annotation.id,)
            else:
                self.names.pop(argument.arg, None)
        self.generic_visit(node)
        self.names = before

    def visit_Assign(self, node: ast.Assign) -> None:
        target, value = node.targets[0], node.value
        pairs = (
            list(zip(target.elts, value.elts, strict=True))
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            else [(target, value)]
        )
        for name, read in pairs:
            chain = self.chain(read)
            if isinstance(name, ast.Name) and chain is not None:
                self.names[name.id] = chain
                if len(chain) > 1:
                    self.found.add(
                        chain
                    )  # a field or a property, or a section, of which nothing counts as read
            elif not (isinstance(name, ast.Attribute) and chain == ("RunSpec",)):  # self._spec = spec
                self.visit(read)

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        for value in (*node.args, *(k.value for k in node.keywords)):
            chain = self.chain(value)
            # A model passed to another function: see `reads` for functions that are analysed in their own module.
            self.found.add((*chain, f"<{ast.unparse(node.func)}>")) if chain else self.visit(value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain = self.chain(node)
        if chain is None:
            self.generic_visit(node)
        else:
            self.found.add(chain)


def reads(source: Path, passed_on: set[str]) -> set[str]:
    """Paths of the leaves that a module reads.

    passed_on: functions with annotated parameters, which are analysed in their own module.
    """
    visitor = _Reads({})
    visitor.visit(ast.parse(source.read_text()))
    return {path for chain in visitor.found for path in _paths(chain, passed_on)}


def _paths(chain: tuple[str, ...], passed_on: set[str]) -> Iterator[str]:
    model: Any = MODELS[chain[0]]
    for section, path in SECTIONS:
        if section is model:
            yield from _below(model, path, chain[1:], passed_on)


def _below(model: type[BaseModel], path: str, rest: tuple[str, ...], passed_on: set[str]) -> Iterator[str]:
    for index, name in enumerate(rest):
        if name.startswith("<"):
            if name.strip("<>") in passed_on:
                return
            break
        if (field := model.model_fields.get(name)) is None:
            yield from _of_attribute(model, name, path)
            return
        path = f"{path}.{field.alias or name}".lstrip(".")
        nested = nested_model(field.annotation)
        if nested is None:
            yield path
            return
        model = nested
        if index == len(rest) - 1:
            return  # tested for None, or assigned; reads of its fields are separate chains
    yield from (f"{path}.{leaf.path}".lstrip(".") for leaf in leaves(model))


def _of_attribute(model: type[BaseModel], name: str, path: str) -> Iterator[str]:
    """Fields read by a model's property or method: those in a property's body, or all fields for a method."""
    member = inspect.getattr_static(model, name)
    if not isinstance(member, property):
        yield from (f"{path}.{leaf.path}".lstrip(".") for leaf in leaves(model))
        return
    visitor = _Reads({"self": (model.__name__,)})
    for statement in ast.parse(textwrap.dedent(inspect.getsource(member.fget))).body[0].body:  # type: ignore[arg-type, attr-defined]
        visitor.visit(statement)
    for chain in visitor.found:
        yield from _below(model, path, chain[1:], set())
