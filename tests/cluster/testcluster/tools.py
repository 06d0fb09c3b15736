"""The programs that a cluster is made of, each built once from its Go module and kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from testcluster import cache, progress
from testcluster.errors import ClusterError, EndedError, MissingError

SOURCE = Path(__file__).resolve().parent.parent / "go"
_PACKAGES = {
    "kube": "./kube",
    "coredns": "./coredns",
    "helm": "helm.sh/helm/v3/cmd/helm",
    "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform",
    "kueue": "sigs.k8s.io/kueue/cmd/kueue",
}
_OWN_MODULES = ("kueue",)
"""Compiled against the dependencies that they are released with, from a module of their own."""
NAMES = tuple(_PACKAGES)
PREPARED = tuple(name for name in NAMES if name not in _OWN_MODULES)
"""Those that every cluster or its tests need; the others are built when they are asked for."""
_OLDEST_GO = (1, 24)


def kubernetes_version() -> str:
    """The version of Kubernetes that is built, like ``v1.34.4``."""
    return _version_of("k8s.io/kubernetes")


def tool(name: str, pace: progress.Pace = progress.PACE) -> Path:
    """The program ``name`` (one of NAMES), built if it is not kept yet: minutes the first time."""
    if name not in _PACKAGES:
        raise ClusterError(f"no program {name!r}; there are {', '.join(NAMES)}")
    return cache.made(name, _key(name), lambda folder: _build(name, folder, pace)) / name


def is_kept(name: str) -> bool:
    """Whether the program ``name`` is built already."""
    return cache.is_made(name, _key(name))


def _key(name: str) -> str:
    # Of the module's own sources only the program's count: a change to one does not build all again.
    own = [] if name in _OWN_MODULES else [SOURCE / "go.mod", SOURCE / "go.sum"]
    return cache.digest(own + ([SOURCE / name] if (SOURCE / name).is_dir() else []))


def kubectl() -> Path:
    """kubectl of the cluster's own version."""
    return tool("kube").with_name("kubectl")


def kueue_objects() -> Path:
    """What the release of Kueue that is built installs, all in one file."""
    return tool("kueue").with_name("objects.yaml")


def _build(name: str, into: Path, pace: progress.Pace) -> None:
    go = _go()
    source = SOURCE / name if name in _OWN_MODULES else SOURCE
    options = ["-trimpath", "-ldflags", " ".join(["-s", "-w", *_stamps(name)])]
    env = {**os.environ, "CGO_ENABLED": "0"}

    def run(step: progress.Step, *words: str, at: Callable[[str], str]) -> None:
        progress.followed(step, [go, *words, _PACKAGES[name]], cwd=source, env=env, at=at)

    lines: set[str] = set()

    def counted(what: str, of: int | None = None) -> Callable[[str], str]:
        """How many different lines there were, of how many."""
        lines.clear()

        def at(line: str) -> str:
            lines.add(line)
            return f"{len(lines):,}{'' if of is None else f' of {of:,}'} {what}"

        return at

    try:
        with progress.step(f"fetching the modules of {name}", pace) as step:
            stale = "{{if .Stale}}{{.ImportPath}}{{end}}"
            run(step, "list", "-deps", *options, "-f", stale, at=counted("modules fetched, packages listed"))
            to_compile = sum(bool(line) and not line.startswith("go: ") for line in lines)
        with progress.step(f"building {name}, once", pace) as step:
            at = counted("packages compiled", of=to_compile)
            run(step, "build", "-v", *options, "-o", str(into / name), at=at)
    except EndedError:
        raise
    except ClusterError as error:
        error.add_note(f"{name} in {source} is not built; call it again: what is compiled is kept")
        raise
    if name == "kube":
        (into / "kubectl").symlink_to(name)
    if name == "kueue":
        sources = _said(go, "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kueue", folder=source)
        objects = _said(str(kubectl()), "kustomize", f"{sources}/config/default", folder=source)
        (into / "objects.yaml").write_text(objects + "\n")


def _said(*argv: str, folder: Path) -> str:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(argv)} in {folder} exited {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout.strip()


def _go() -> str:
    go = shutil.which("go")
    if go is None:
        raise MissingError(
            f"Go {'.'.join(map(str, _OLDEST_GO))} or newer is needed to build the test cluster, and there is no `go` in"
            " PATH; install it, or set KUBECONFIG to use a cluster that is there"
        )
    said = subprocess.run(
        [go, "env", "GOVERSION"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    found = re.match(r"go(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_GO:
        raise MissingError(
            f"{go} is {said.strip()}; the test cluster needs {'.'.join(map(str, _OLDEST_GO))} or newer"
        )
    return go


def _stamps(name: str) -> list[str]:
    """What a release of the program has written into it: a kubelet of no version is refused by its API server's users."""
    version = kubernetes_version()
    major, minor = version.removeprefix("v").split(".")[:2]
    stamps = {
        "kube": {
            "k8s.io/component-base/version.gitVersion": version,
            "k8s.io/component-base/version.gitMajor": major,
            "k8s.io/component-base/version.gitMinor": minor,
            "k8s.io/client-go/pkg/version.gitVersion": version,
        },
        "helm": {
            "helm.sh/helm/v3/internal/version.version": _version_of("helm.sh/helm/v3"),
            "helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor": major,
            "helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor": minor,
            "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor": major,
            "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor": minor,
        },
    }
    return [f"-X={variable}={value}" for variable, value in stamps.get(name, {}).items()]


def _version_of(module: str) -> str:
    found = re.search(rf"^\t{re.escape(module)} (v\S+)", (SOURCE / "go.mod").read_text(), re.MULTILINE)
    assert found, f"{module} is not in {SOURCE / 'go.mod'}"
    return found[1]
