"""reasoning-gym, imported one category at a time.

``import reasoning_gym`` runs every category and with them sympy, matplotlib and pyfiglet: seconds and 100
MiB, in each process that needs one scorer of ten lines. A category alone is a tenth of a second. So the
package's own ``__init__`` is put off: a module that knows where its submodules are stands in ``sys.modules``,
and the first attribute that it does not have (say, ``reasoning_gym.create_dataset`` asked for by someone
else) runs the real ``__init__`` in place. Nothing of the library is changed, and whoever imports it later
gets all of it.

Two categories import for all of their tasks what one does not need everywhere. ``zebra_puzzles`` needs pycosat, which
only a C compiler can install. cellpylib, of the games of life, imports matplotlib for plots that no task draws, and the
operator's image is without it. Where one of them is missing a module stands in for it that says so when it is used.
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


class _PutOffPackage(types.ModuleType):
    """A package whose ``__init__`` runs when an attribute is missed, not before."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # The import system probes for such names; they must not run the package.
            raise AttributeError(name)
        with _lock:
            spec = self.__spec__
            if self.__class__ is _PutOffPackage and spec is not None and spec.loader is not None:
                self.__class__ = types.ModuleType  # type: ignore[assignment]
                with _matplotlib_or_a_stand_in():
                    spec.loader.exec_module(self)
        return getattr(self, name)


def _stand_in_for_pycosat() -> None:
    def itersolve(*_: object) -> Any:
        raise SourceError(
            "reasoning-gym task 'zebra_puzzles' needs pycosat, which is built by a C compiler and left out of the locks: "
            "pip install pycosat==0.6.6, for every process of the run"
        )

    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = module = types.ModuleType("pycosat")
        module.itersolve = itersolve  # type: ignore[attr-defined]


_PICTURES = ("matplotlib.pyplot", "matplotlib.animation", "matplotlib.collections", "mpl_toolkits.mplot3d")


class _NoPictures(types.ModuleType):
    """Stands in for a module of matplotlib: there are no pictures, and whoever draws one is told."""

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
def _matplotlib_or_a_stand_in() -> Iterator[None]:
    """For the import of cellpylib, which keeps what it finds; an import of matplotlib afterwards fails as it should.

    Within itself (a category's import can run the package's ``__init__``) it finds the stand-in, and leaves it.
    """
    if importlib.util.find_spec("matplotlib") is not None:
        yield
        return
    stand_ins: dict[str, types.ModuleType] = {}
    for name in _PICTURES:
        package, _, module = name.partition(".")
        stand_ins.setdefault(package, _NoPictures(package))
        stand_ins[name] = _NoPictures(name)
        setattr(stand_ins[package], module, stand_ins[name])
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _spec() -> importlib.machinery.ModuleSpec:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SourceError("reasoning-gym is not installed: pip install 'reasoning-gym>=0.1.23'")
    return spec


@functools.cache
def task_categories() -> dict[str, str]:
    """Task name → category (``chain_sum`` → ``arithmetic``), read from the package's text without running it.

    ``composite`` is not among them: it stands outside the categories and mixes tasks by nested configuration.
    """
    roots = _spec().submodule_search_locations
    assert roots is not None
    found: dict[str, str] = {}
    for root in map(Path, roots):
        for file in sorted(root.glob("*/**/*.py")):
            match = _NAME_IN_SOURCE.search(file.read_text(encoding="utf-8"))
            if match is not None:
                found[match[1] or match[2]] = file.relative_to(root).parts[0]
    return found


def load_task_classes(name: str) -> tuple[type[Any], type[Any]]:
    """The data set class and the configuration class of the task ``name``.

    Raises:
        UnknownTaskError: there is none of that name; the message has the close ones.
        SourceError: reasoning-gym is missing, or the category cannot be imported.
    """
    category = task_categories().get(name)
    if category is None:
        hint = did_you_mean(name, task_categories())
        raise UnknownTaskError(
            f"reasoning-gym has no task {name!r}{hint or '; it has ' + ', '.join(sorted(task_categories()))}"
        )
    with _lock, warnings.catch_warnings():
        # Some of its dependencies compile with SyntaxWarnings the first time.
        warnings.simplefilter("ignore")
        if _PACKAGE not in sys.modules:
            module = importlib.util.module_from_spec(_spec())
            module.__class__ = _PutOffPackage
            sys.modules[_PACKAGE] = module
            _stand_in_for_pycosat()
        try:
            # In this order: these import each other, and only so does it resolve (the package itself does the
            # same).
            importlib.import_module(f"{_PACKAGE}.coaching")
            with _matplotlib_or_a_stand_in():
                importlib.import_module(f"{_PACKAGE}.{category}")
        except ImportError as error:
            raise SourceError(f"reasoning-gym task {name!r} cannot be imported: {error}") from error
        registry: dict[str, tuple[type[Any], type[Any]]]
        registry = importlib.import_module(f"{_PACKAGE}.factory").DATASETS
    return registry[name]
