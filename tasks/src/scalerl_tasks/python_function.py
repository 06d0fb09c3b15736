"""A function or class in a file or module of the user: its import, and errors in it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scalerl_tasks.code_digest import keep_code
from scalerl_tasks.errors import VerifierError
from scalerl_tasks.verdict import SCORE_RANGE

_NO_MEMORY = ("failed to map segment", "Cannot allocate memory", "can't allocate memory")
"""Of the errors of libraries at the limit of memory."""


@dataclass(frozen=True, slots=True)
class PythonFunction:
    """A function and how it is called; picklable."""

    function: str
    path: str | None = None
    module: str | None = None
    signature: str = "score"
    """``score``, ``group``, ``verl`` or ``trl``."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    """Whether TRL's prompts and completions are messages."""
    template: str | None = None
    """Template of the prompt, for TRL's prompts."""
    system: str | None = None
    range: tuple[float, float] = SCORE_RANGE
    """Lowest and highest reward."""
    digest: str = ""
    """Of its code, as :func:`~.code_digest.code_digest` gives it; other code is refused. Empty: any."""

    @property
    def label(self) -> str:
        """File or module, and function."""
        return f"{Path(self.path).name if self.path is not None else self.module}:{self.function}"


def imported(given: PythonFunction, field: str = "verifier.python") -> Any:
    """The module of the function, or of a class. ``field``: where the spec names it.

    Raises:
        VerifierError: there is none, or importing it fails.
    """
    try:
        if given.module is not None:
            if given.digest:
                keep_code(given.digest, module=given.module, field=field)
            return importlib.import_module(given.module)
        path = Path(given.path or "")
        if not path.is_file():
            what = "is not a file" if path.exists() else "does not exist"
            raise VerifierError(
                f"{path} {what}; {field}.path is relative to the run file, and on a cluster the path of a mounted volume"
            )
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # its neighbours, behind installed packages
        name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else "scalerl_reward"
        loader = keep_code(given.digest, path, field=field).loader(name, path) if given.digest else None
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        if spec is None or spec.loader is None:
            raise VerifierError(f"{path} is not a Python file; its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # for dataclasses and pickle
        spec.loader.exec_module(module)
        return module
    except VerifierError:
        raise
    except ModuleNotFoundError as error:
        where = given.path or f"module {given.module}"
        raise VerifierError(
            f"{where} cannot be imported: there is no module {error.name!r}{_place(error, given.path)}; if only a trainer in "
            'that file needs it, move the function to a file of its own, or what trains below if __name__ == "__main__":; else install it '
            "where completions are graded: in this environment, on a cluster in images.generator and images.trainer"
        ) from None
    except BaseException as error:
        advice = f"; install its package and give {field}.module" if "relative import" in str(error) else ""
        raise VerifierError(
            f"{given.path or f'module {given.module}'} cannot be imported: {described(error, given.path)}{advice}"
        ) from None


def described(error: BaseException, file: str | None) -> str:
    """An error's type and text, with its line in ``file``."""
    try:
        text = str(error)
    except BaseException:
        text = ""
    if any(sign in text for sign in _NO_MEMORY):
        text = f"{text[:100]}; raise verifier.memory, or import at the head of the file"
    return f"{type(error).__name__}{': ' + text[:160] if text else ''}{_place(error, file)}"


def _place(error: BaseException, file: str | None) -> str:
    """The last line of ``file`` in the traceback."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if file is not None and trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" ({Path(file).name}, line {line})" if file and line else ""
