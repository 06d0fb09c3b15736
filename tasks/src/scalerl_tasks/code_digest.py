"""The digest of a user's Python code: the file of a function, and the files of its neighbours that it imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, Final

from scalerl_tasks.errors import VerifierError

_VERIFIER: Final = "verifier.python"


def code_digest(path: Path | None = None, module: str | None = None, field: str = _VERIFIER) -> str:
    """SHA-256 (hex) of a file, or of an installed module, and of all files that it imports from its folder or package, directly
    or not. Nothing is imported or run. ``field``: where the spec names it.

    Raises:
        VerifierError: there is no such file or module.
    """
    return _read(path, module, field)[0]


def keep_code(
    wanted: str, path: Path | None = None, module: str | None = None, field: str = _VERIFIER
) -> KeptCode:
    """Read the files of a digest, and let this process and those that it forks import them as they were read, also if they are edited
    later.

    Raises:
        VerifierError: there is no such file or module, or the digest is not ``wanted``.
    """
    digest, files = _read(path, module, field)
    if digest != wanted:
        raise VerifierError(
            f"{path or module}: the code of the reward has changed since it was opened for the run; restore it, or restart the run, "
            "which goes on from its checkpoint with the new code and a new segment of its curve"
        )
    kept = KeptCode({file.absolute(): content for file, content in files.items()})
    sys.meta_path.insert(0, kept)
    return kept


class KeptCode:
    """Finds modules as the other finders do, with the content of the files that were read."""

    def __init__(self, files: Mapping[Path, bytes]) -> None:
        self._files = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        others = (one for one in sys.meta_path if hasattr(one, "find_spec") and not isinstance(one, KeptCode))
        spec = next(filter(None, (one.find_spec(name, path, target) for one in others)), None)
        if spec is not None and spec.has_location and spec.origin is not None:
            spec.loader = self.loader(name, Path(spec.origin)) or spec.loader
        return spec

    def loader(self, name: str, path: Path) -> SourceFileLoader | None:
        """The loader of a file, if it is one of those that were read."""
        # Not resolved: an updated ConfigMap is another target of a link.
        content = self._files.get(path.absolute())
        return None if content is None else _Loader(name, str(path), content)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, content: bytes) -> None:
        super().__init__(name, path)
        self._content = content

    def get_data(self, path: str) -> bytes:
        return self._content

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError("no bytecode is read or written, since it belongs to the file as it is now")


def _read(path: Path | None, module: str | None, field: str) -> tuple[str, dict[Path, bytes]]:
    """The digest, and the content of its files."""
    if path is not None:
        first, root, package = path, path.parent, None
    else:
        assert module is not None
        root, package = _root_of(module, field), module.partition(".")[0]
        found = list(_files(root, module))
        last = module.rpartition(".")[2]
        if not found or last not in (found[-1].stem, found[-1].parent.name):
            raise VerifierError(f"{field}.module: there is no module {module!r} where {package} is installed")
        first = found[-1]
    pending, seen = [first], dict[Path, bytes]()
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        try:
            seen[file] = file.read_bytes()
        except OSError as error:
            raise VerifierError(f"{file}: {error.strerror or error}; correct {field}.path") from error
        for name in _imports(seen[file], file, root):
            if package is None or name.partition(".")[0] == package:
                pending.extend(_files(root, name))
    digest = hashlib.sha256(f"{first.relative_to(root)}\n".encode())
    for file in sorted(seen):
        digest.update(f"{file.relative_to(root)}\0{hashlib.sha256(seen[file]).hexdigest()}\n".encode())
    return digest.hexdigest(), seen


def _root_of(module: str, field: str) -> Path:
    """The folder that has the top-level package of a module."""
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise VerifierError(
            f"{field}.module: there is no package {top!r}; install it where completions are graded: in this environment, "
            "on a cluster in the images"
        )
    place = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if place is None:
        raise VerifierError(f"{field}.module: {top!r} has no files")
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
