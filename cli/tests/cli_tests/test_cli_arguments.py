"""The command line itself: its help, its tables of arguments, and what it imports."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

from scalerl_cli import arguments


def test_command_is_a_module_with_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scalerl_cli.main", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    for word in ("run", "validate", "plot", "exit codes: 0 finished, 1 failed, 2 invalid input"):
        assert word in done.stdout


def test_tables_of_arguments_name_functions_and_arguments_that_exist() -> None:
    used: set[str] = set()
    for words, options in arguments._COMMANDS.items():
        module, function = words.split()[1].split(":")
        assert callable(getattr(import_module(f"scalerl_cli.{module}"), function))
        for name, text in options.items():
            used |= {name} if isinstance(text, str) else text.keys()
    assert used >= arguments._SETTINGS.keys()


def test_nothing_heavy_is_imported_before_the_first_child() -> None:
    code = (
        "import sys, scalerl_cli.main, scalerl_cli.run, scalerl_local.local_runtime; scalerl_cli.main.parser();"
        "heavy = {'matplotlib', 'scipy', 'numpy', 'rich', 'aiohttp', 'reasoning_gym', 'scalerl_tasks', 'torch',"
        "         'scalerl_operator', 'kopf', 'kubernetes', 'prometheus_client'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout == "[]\n", done.stderr
