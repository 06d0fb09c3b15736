"""The digest of a user's Python code: the file of a function, and the files of its neighbours that it imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path

from scalerl_tasks.errors import VerifierError


def code_digest(path: Path | None = None, module: str | None = None) -> str:
    """SHA-256 (hex) of a file, or of an installed module, and of all files that it imports from its folder or package, directly
    or not. Nothing is imported or run.

    Raises:
        VerifierError: there is no such file or module.
    """
    if path is not None:
        first, root, package = path, path.parent, None
    else:
        assert module is not None
        root, package = _root_of(module), module.partition(".")[0]
        found = list(_files(root, module))
        last = module.rpartition(".")[2]
        if not found or last not in (found[-1].stem, found[-1].parent.name):
            raise VerifierError(
                f"verifier.python.module: there is no module {module!r} where {package} is installed"
            )
        first = found[-1]
    pending, seen = [first], dict[Path, bytes]()
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        try:
            seen[file] = file.read_bytes()
        except OSError as error:
            raise VerifierError(f"{file}: {error.strerror or error}; correct verifier.python.path") from error
        for name in _imports(seen[file], file, root):
            if package is None or name.partition(".")[0] == package:
                pending.extend(_files(root, name))
    digest = hashlib.sha256(f"{first.relative_to(root)}\n".encode())
    for file in sorted(seen):
        digest.update(f"{file.relative_to(root)}\0{hashlib.sha256(seen[file]).hexdigest()}\n".encode())
    return digest.hexdigest()


def _root_of(module: str) -> Path:
    """The folder that has the top-level package of a module."""
    top = module.partition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(top, sys.path)
    if spec is None:
        raise VerifierError(
            f"verifier.python.module: there is no package {top!r}; install it where completions are graded: in this environment, "
            "on a cluster in the images"
        )
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if place is None:
        raise VerifierError(f"verifier.python.module: {top!r} has no files")
    path = Path(place)
    return path.parent.parent if path.name == "__init__.py" else path.parent


def _files(root: Path, name: str) -> Iterator[Path]:
    """The files of a module below ``root``: those of its packages, then its own."""
    folder = root
    parts = name.split(".")
    for at, part in enumerate(parts):
        for file in (folder / part / "__init__.py", folder / f"{part}.py"):
            if file.is_file():
                yield file
                break
        else:
            if at == len(parts) - 1 or not (folder / part).is_dir():
                return
        folder /= part


def _imports(content: bytes, file: Path, root: Path) -> Iterator[str]:
    """Names of the modules that a file may import, absolute from ``root``."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # said when the file is opened
        return
    package = file.relative_to(root).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            if base:
                yield ".".join(base)
            yield from (".".join([*base, alias.name]) for alias in node.names)
