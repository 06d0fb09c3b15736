"""Whether vLLM has a class for an architecture, from vLLM's own registry, which is read as text: nothing is imported.

Where vLLM is not installed, such as in the trainer's image, the lists are those of :mod:`.vllm_architectures`, which ``make docs``
writes from the registry of the locked release.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalerl_trainer.models import vllm_architectures

_NAMES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
_DROPPED = "_PREVIOUSLY_SUPPORTED_MODELS"


@dataclass(frozen=True, slots=True)
class Registry:
    """Architectures of a release of vLLM."""

    served: frozenset[str]
    """Those that it has a class for."""
    dropped: dict[str, str]
    """Those that an earlier release had, with the last one of them."""


def read_registry(path: Path) -> Registry:
    """The architectures in the source of ``vllm.model_executor.models.registry``. Raises ``KeyError`` if it has no such lists."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        name = (
            node.targets[0].id
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            else ""
        )
        if isinstance(node, ast.Assign) and name in (*_NAMES, _DROPPED):
            found[name] = ast.literal_eval(node.value)
    return Registry(frozenset().union(*(found[name] for name in _NAMES)), found[_DROPPED])


def registry_path() -> Path | None:
    """The file of the installed vLLM's registry, or None."""
    package = importlib.util.find_spec("vllm")
    places = package.submodule_search_locations if package is not None else None
    path = Path(next(iter(places)), "model_executor/models/registry.py") if places else None
    return path if path is not None and path.is_file() else None


@functools.cache
def registry() -> Registry:
    """That of the installed vLLM, else of the release that this one is locked to."""
    listed = Registry(vllm_architectures.SERVED, vllm_architectures.DROPPED)
    path = registry_path()
    try:
        return listed if path is None else read_registry(path)
    except (OSError, ValueError, KeyError, SyntaxError):
        return listed


def serving_problem(architectures: Iterable[str]) -> str | None:
    """Why vLLM cannot serve a model of these architectures, if an earlier release could.

    Others that are not in its registry may run with the code of transformers (:mod:`.structure` asks for that).
    """
    names = [str(name) for name in architectures]
    if any(name in registry().served for name in names):
        return None
    for name in names:
        if name in registry().dropped:
            return f"vLLM no longer serves {name}, which it had until {registry().dropped[name]}"
    return None


def source(found: Registry) -> str:
    """The text of :mod:`.vllm_architectures`."""
    served = "".join(f'        "{name}",\n' for name in sorted(found.served))
    dropped = "".join(f'    "{name}": "{found.dropped[name]}",\n' for name in sorted(found.dropped))
    return (
        '"""Architectures in the registry of the locked vLLM; written by ``make docs``, see :mod:`.served`."""\n\n'
        "from typing import Final\n\n"
        f"SERVED: Final = frozenset(\n    (\n{served}    )\n)\n"
        f"DROPPED: Final[dict[str, str]] = {{\n{dropped}}}\n"
    )
