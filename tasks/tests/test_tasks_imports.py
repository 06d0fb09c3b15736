"""Importing the package stays cheap, and never brings torch."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "reasoning_gym", "sympy", "math_verify", "matplotlib", "numpy", "pydantic")


def modules_after(code: str) -> set[str]:
    """The names in sys.modules after running ``code`` in a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


def test_import_is_light():
    assert modules_after("import scalerl_tasks").isdisjoint(HEAVY)


def test_gym_loader_imports_one_category():
    loaded = modules_after("import scalerl_tasks as t; t.ReasoningGymSource(t.GymTask('chain_sum'))[0]")
    assert "reasoning_gym.arithmetic.chain_sum" in loaded
    assert loaded.isdisjoint({"torch", "sympy", "matplotlib", "reasoning_gym.algebra", "reasoning_gym.games"})


def test_gym_loader_works_without_matplotlib():
    """As in the operator's image: cellpylib imports it for plots, and a category of tasks imports cellpylib."""
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import scalerl_tasks as t; print(t.ReasoningGymSource(t.GymTask('game_of_life'))[0])\n"
        "import cellpylib\n"
        "try: cellpylib.plot([[0]])\n"
        "except t.SourceError as error: assert 'pip install' in str(error), error\n"
        "else: raise AssertionError('drawn')"
    )
    loaded = modules_after(code)
    assert "cellpylib" in loaded
    assert not {name for name in loaded if name.startswith(("matplotlib", "mpl_toolkits"))}


def test_gym_loader_stub_is_removed_after_import():
    """A category that runs the package's own __init__ during its import, or checks for matplotlib."""
    code = (
        "import importlib.util, sys; sys.modules['matplotlib'] = None\n"
        "from scalerl_tasks.gym_loader import _matplotlib_or_stub as stand_in\n"
        "with stand_in():\n"
        "    assert importlib.util.find_spec('matplotlib').loader is None\n"
        "    with stand_in(): import matplotlib.pyplot\n"
        "    import matplotlib.animation"
    )
    assert not {name for name in modules_after(code) if name.startswith("matplotlib")}


@pytest.mark.slow
def test_gym_loader_loads_full_library_on_demand():
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import scalerl_tasks as t; t.ReasoningGymSource(t.GymTask('chain_sum'))[0]\n"
        "import reasoning_gym\n"
        "assert reasoning_gym.create_dataset('countdown', seed=1, size=1)[0]['question']\n"
        "from reasoning_gym.factory import DATASETS\n"
        "from scalerl_tasks.gym_loader import task_categories\n"
        "assert set(DATASETS) - set(task_categories()) == {'composite'}, set(DATASETS) ^ set(task_categories())\n"
        "assert set(task_categories()) <= set(DATASETS)"
    )
    assert "reasoning_gym.games" in modules_after(code)
