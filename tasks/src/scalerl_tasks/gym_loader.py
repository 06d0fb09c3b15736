"""Imports reasoning-gym one category at a time.

``import reasoning_gym`` runs every category, and with them sympy, matplotlib and pyfiglet: seconds and 100 MiB, in each
process that needs one scorer of ten lines. One category takes a tenth of a second. Therefore the package's own ``__init__`` is
deferred: ``sys.modules`` gets a module that can find its submodules, and the first access to a missing attribute (say,
``reasoning_gym.create_dataset`` by other code) runs the real ``__init__`` in place. The library itself is not changed, and
later importers get all of it.

Two categories import packages that most of their tasks do not need. ``zebra_puzzles`` needs pycosat, which only a C
compiler can install. cellpylib, of the games of life, imports matplotlib for plots that no task draws, and the operator's
image lacks matplotlib. If one is missing, a stub replaces it that raises an error when it is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import re
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalerl_tasks.errors import SourceError, UnknownTaskError, did_you_mean

_PACKAGE = "reasoning_gym"
_NAME_IN_SOURCE = re.compile(
    r"^DATASET_NAME = \"([^\"\n]+)\"|^register_dataset\(\"([^\"\n]+)\"", re.MULTILINE
)
_lock = threading.RLock()


class _LazyPackage(types.ModuleType):
    """A package whose ``__init__`` runs when an attribute is missing, not at import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # The import system looks up such names, which must not run the package.
            raise AttributeError(name)
        with _lock:
            spec = self.__spec__
            if self.__class__ is _LazyPackage and spec is not None and spec.loader is not None:
                self.__class__ = types.ModuleType  # type: ignore[assignment]
                with _matplotlib_or_stub():
                    spec.loader.exec_module(self)
        return getattr(self, name)


def _stub_pycosat() -> None:
    def itersolve(*_: object) -> Any:
        raise SourceError(
            "reasoning-gym task 'zebra_puzzles' needs pycosat, which is built by a C compiler and left out of the locks: "
            "pip install pycosat==0.6.6, for every process of the run"
        )

    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = module = types.ModuleType("pycosat")
        module.itersolve = itersolve  # type: ignore[attr-defined]


_MATPLOTLIB_MODULES = (
    "matplotlib.pyplot",
    "matplotlib.animation",
    "matplotlib.collections",
    "mpl_toolkits.mplot3d",
)


class _MatplotlibStub(types.ModuleType):
    """Stub of a matplotlib module: drawing raises an error with the package to install."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)  # without one, find_spec of it raises

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        text = f"{self.__name__}.{name} needs matplotlib, which is not installed here: pip install 'matplotlib>=3.10'"

        def draw(*_: object, **__: object) -> Any:
            raise SourceError(text)

        return draw


@contextlib.contextmanager
def _matplotlib_or_stub() -> Iterator[None]:
    """Provide a stub of matplotlib, if it is missing, during the import of cellpylib, which keeps a reference to it. A later
    import of matplotlib fails as usual.

    A nested call (a category's import can run the package's ``__init__``) keeps the stub of the outer one.
    """
    if importlib.util.find_spec("matplotlib") is not None:
        yield
        return
    stubs: dict[str, types.ModuleType] = {}
    for name in _MATPLOTLIB_MODULES:
        package, _, module = name.partition(".")
        stubs.setdefault(package, _MatplotlibStub(package))
        stubs[name] = _MatplotlibStub(name)
        setattr(stubs[package], module, stubs[name])
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


@functools.cache
def task_categories() -> dict[str, str]:
    """Task name → category (``chain_sum`` → ``arithmetic``), read from the package's source without running it.

    It excludes ``composite``, which has no category and mixes tasks by nested configuration.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    found: dict[str, str] = {}
    for root in map(Path, spec.submodule_search_locations or ()):
        for file in sorted(root.glob("*/**/*.py")):
            match = _NAME_IN_SOURCE.search(file.read_text(encoding="utf-8"))
            if match is not None:
                found[match[1] or match[2]] = file.relative_to(root).parts[0]
    return found


def load_task_classes(name: str) -> tuple[type[Any], type[Any]]:
    """The data set class and the configuration class of the task ``name``.

    Raises:
        UnknownTaskError: no task of this name; the message lists similar names.
        SourceError: the category cannot be imported.
    """
    category = task_categories().get(name)
    if category is None:
        hint = did_you_mean(name, task_categories())
        raise UnknownTaskError(
            f"reasoning-gym has no task {name!r}{hint or '; it has ' + ', '.join(sorted(task_categories()))}"
        )
    with _lock, warnings.catch_warnings():
        # Some of its dependencies give SyntaxWarnings when first compiled.
        warnings.simplefilter("ignore")
        if _PACKAGE not in sys.modules:
            spec = importlib.util.find_spec(_PACKAGE)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            module.__class__ = _LazyPackage
            sys.modules[_PACKAGE] = module
            _stub_pycosat()
        try:
            # In this order: these modules import each other, and only this order works (the package does the same).
            importlib.import_module(f"{_PACKAGE}.coaching")
            with _matplotlib_or_stub():
                importlib.import_module(f"{_PACKAGE}.{category}")
        except ImportError as error:
            raise SourceError(f"reasoning-gym task {name!r} cannot be imported: {error}") from error
        registry: dict[str, tuple[type[Any], type[Any]]]
        registry = importlib.import_module(f"{_PACKAGE}.factory").DATASETS
    return registry[name]
