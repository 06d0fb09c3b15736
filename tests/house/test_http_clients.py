"""Every HTTP client of the project follows no redirect, decompresses nothing, and bounds what it reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARIES = {
    "aiohttp",
    "httpx",
    "requests",
    "urllib",
    "http",
    "huggingface_hub",
    "s3fs",
    "boto3",
    "fsspec",
}

BOUNDED = {
    "api/src/scalerl_api/http_client.py",
    "generator/src/scalerl_generator/coordinator_client.py",
    "generator/src/scalerl_generator/rollouts/teacher.py",
    "generator/src/scalerl_generator/vllm_client.py",
    "autoscaling/src/scalerl_autoscaling/forecast_client.py",
    "lifecycle/src/scalerl_lifecycle/coordinator_client.py",
    "local/src/scalerl_local/prober.py",
    "tasks/src/scalerl_tasks/environments/openenv.py",
    "tasks/src/scalerl_tasks/environments/openenv_schema.py",
    "tasks/src/scalerl_tasks/environments/server_grader.py",
    "tasks/src/scalerl_tasks/grading/http_grader.py",
    "trainer/src/scalerl_trainer/coordinator_client.py",
    "trainer/src/scalerl_trainer/publish/actor_control.py",
}
"""The clients of this project."""
OTHERS = {
    "operator/src/scalerl_operator/kube/client.py": "the API server, which the operator trusts, over TLS",
    "operator/src/scalerl_operator/kube/transport.py": "the same",
    "tasks/src/scalerl_tasks/dataset/hub.py": "the hub, by its library",
    "trainer/src/scalerl_trainer/export_targets.py": "the hub and buckets that the run names, by their libraries",
    "trainer/src/scalerl_trainer/model_cache.py": "the hub, by its library",
    "trainer/src/scalerl_trainer/models/hub.py": "the hub, by its library",
    "trainer/src/scalerl_trainer/prepare.py": "the hub, by its library",
}
"""Clients of others, which are trusted as far as the run names them."""
NO_CLIENTS = {
    "coordinator/src/scalerl_coordinator/http.py",
    "coordinator/src/scalerl_coordinator/main.py",
    "coordinator/src/scalerl_coordinator/server.py",
    "curvefit/src/scalerl_curvefit/sidecar/__main__.py",
    "curvefit/src/scalerl_curvefit/sidecar/app.py",
    "generator/src/scalerl_generator/actor.py",
    "generator/src/scalerl_generator/actor_api.py",
    "operator/src/scalerl_operator/main.py",
    "trainer/src/scalerl_trainer/metrics.py",
}
"""Servers, and names of errors."""
PURE = {("urllib", "parse"), ("aiohttp", "web"), ("http", "server"), ("http", "HTTPStatus")}
REQUESTS = {"get", "post", "put", "patch", "delete", "head", "request", "stream"}


def imports(tree: ast.AST) -> Iterator[str]:
    """The HTTP libraries that a module imports for clients."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                first, _, rest = name.name.partition(".")
                if first in LIBRARIES and (first, rest.partition(".")[0]) not in PURE:
                    yield first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            first, _, rest = node.module.partition(".")
            names = {(first, rest)} if rest else {(first, name.name) for name in node.names}
            if first in LIBRARIES and not names <= PURE:
                yield first


def sources() -> dict[str, ast.Module]:
    paths = sorted(ROOT.glob("*/src/**/*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def test_every_client_is_known() -> None:
    clients = {path for path, tree in sources().items() if any(imports(tree))}
    assert clients - NO_CLIENTS == BOUNDED | OTHERS.keys()


@pytest.mark.parametrize("path", sorted(BOUNDED))
def test_client_is_bounded(path: str) -> None:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        reads = isinstance(node, ast.Attribute) and node.attr in ("text", "json", "iter_bytes", "iter_lines")
        if reads and ast.unparse(node) not in ("msgspec.json", "prompt.text"):
            raise AssertionError(
                f"{where}: {ast.unparse(node)} reads without a limit; use scalerl_api.http_answers"
            )
        if not isinstance(node, ast.Call):
            continue
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        called = ast.unparse(node.func)
        if called == "aiohttp.ClientSession":
            assert keywords.get("auto_decompress") == "False", f"{where}: auto_decompress=False"
        if called == "httpx.Client":
            assert "wire_headers(token)" in keywords.get("headers", ""), (
                f"{where}: with the headers of IDENTITY"
            )
            assert keywords.get("follow_redirects", "False") == "False", where
        if isinstance(node.func, ast.Attribute) and node.func.attr in REQUESTS:
            owner = ast.unparse(node.func.value)
            if owner.rpartition(".")[2] in ("session", "_session") or owner.startswith("self._session"):
                assert keywords.get("allow_redirects") == "False", f"{where}: allow_redirects=False"
            if owner.endswith(("http", "_http")):
                assert node.func.attr == "stream", f"{where}: {node.func.attr} reads the whole answer"
        if isinstance(node.func, ast.Attribute) and node.func.attr == "read" and not node.args:
            raise AssertionError(f"{where}: reads without a limit; use scalerl_api.http_answers")
