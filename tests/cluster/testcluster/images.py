"""The project's images, built from its Dockerfiles without a registry, for tests: CPUs, on a base made here."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from testcluster import cache, debian, progress
from testcluster.errors import ClusterError, MissingError
from testcluster.handle import Cluster
from testcluster.layers import Built
from testcluster.progress import Step
from testcluster.runtime import Loader

PROJECT = Path(__file__).resolve().parents[3]
ROLES = ("operator", "trainer", "generator")
VARIABLE = "SCALERL_TEST_IMAGES"
DEFAULT_BASE = "the Dockerfiles' own"
# The release of Debian whose Python the locks are for.
_SUITE = "bookworm"
_PACKAGES = ("python3", "python3-venv", "ca-certificates")
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_SECONDS = 1800
_COPY = re.compile(r"^COPY (?!--from=)(.+) \S+$", re.MULTILINE)
_OUR_CODE = "FROM packages AS members\n"
"""In each Dockerfile, what follows the layers of packages."""


@dataclass(frozen=True)
class Buildah:
    """buildah with a store of its own in the cache folder: layers stay, so a later build makes only what changed."""

    root: Path

    @classmethod
    def here(cls) -> Buildah:
        """Root only: layers are unpacked as their owners."""
        if os.geteuid() != 0:
            raise MissingError("building images without Docker needs root")
        debian.installed(debian.IMAGES)
        return cls(cache.folder() / "buildah")

    @property
    def store(self) -> Path:
        return self.root / "store"

    def run(self, *words: str | Path, step: Step | None = None, seconds: float = _SECONDS) -> str:
        """What buildah printed; with ``step``, which follows it, its last lines, errors among them.

        ``seconds``: its limit, with ``step`` that of its silence (packages are fetched and unpacked without a word).
        """
        (self.root / "tmp").mkdir(parents=True, exist_ok=True)
        where = ("--root", self.store, "--runroot", self.root / "run", "--storage-driver", "overlay")
        argv = [debian.program("buildah"), *map(str, (*where, *words))]
        env = {**os.environ, "TMPDIR": str(self.root / "tmp"), "BUILDAH_ISOLATION": "chroot"}
        if step is not None:
            return progress.followed(
                step, argv, cwd=PROJECT, env=env, silent_seconds=seconds, at=_instruction
            )
        done = subprocess.run(argv, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=seconds)
        if done.returncode != 0:
            what = (done.stdout + done.stderr).strip()[-4000:]
            raise ClusterError(f"`buildah {' '.join(map(str, words))}` exited {done.returncode}:\n{what}")
        return done.stdout

    def has(self, name: str) -> bool:
        return bool(self.run("images", "--quiet", "--filter", f"reference={name}", seconds=60).strip())

    def build(self, role: str, built: Collection[str] = ()) -> str:
        """The image of a role, named by what it is made from; nothing is done for a name in ``built``.

        For a holder of ``lock`` only: the role's earlier images go.
        """
        base = _base_name()
        name = f"localhost/scalerl-{role}:{tag(role, base)}"
        if name in built:
            return name
        if not self.has(name):
            self.sweep()
            self._base(base)
            with progress.step(f"building {name}") as step, _package_index() as secrets:
                self.run(
                    "build",
                    *("--layers", "--file", PROJECT / f"Dockerfile.{role}", "--tag", name),
                    *("--build-arg", f"BASE_IMAGE={base}", "--build-arg", "DEVICE=cpu"),
                    *secrets,
                    PROJECT,
                    step=step,
                )
            self.forget(role, but=name)
        return name

    def lock(self) -> IO[str]:
        """One process at a time makes images, and moves them: another's newer one would take a layer away."""
        return cache.lock(self.root.parent / ".images")

    def sweep(self) -> None:
        """Remove what builds that were killed have left: their containers keep layers, gigabytes each.

        For a holder of ``lock`` only: no other process builds.
        """
        self.run("rm", "--all", seconds=300)
        shutil.rmtree(self.root / "tmp", ignore_errors=True)

    def forget(self, role: str, but: str) -> None:
        """Remove the role's earlier images, and with them layers that none is made of any more.

        What builds keep for later ones has no name. It goes when more has changed than our code, an image's last layer:
        else the packages of every lock there was would stay, gigabytes each.
        """
        names = self.run("images", "--format", "{{.Name}}:{{.Tag}}", seconds=60).split()
        old = [name for name in names if name.startswith(f"localhost/scalerl-{role}:") and name != but]
        if old:
            packages = self._packages(but)
            changed = any(self._packages(name) != packages for name in old)
            self.run("rmi", *old, seconds=300)
            if changed:
                self.run("rmi", "--prune")

    def _packages(self, name: str) -> list[str]:
        """The layers of an image below our code."""
        said = self.run(
            "inspect", "--type", "image", "--format", "{{.OCIv1.RootFS.DiffIDs}}", name, seconds=60
        )
        return said.strip().strip("[]").split()[:-1]

    def _base(self, name: str) -> None:
        """Debian's smallest system and its Python, from the mirror that this machine uses."""
        if self.has(name):
            return
        with progress.step(f"building {name}") as step:
            container = self.run("from", "scratch").strip()
            try:
                tree = Path(self.run("mount", container).strip())
                _debootstrap(tree, step)
                self.run("commit", "--quiet", container, name)
            finally:
                self.run("rm", container)


def build_all() -> None:
    """Every role's image, for clusters to come."""
    buildah = Buildah.here()
    for role in ROLES:
        with buildah.lock():
            packages = _packages_digest(role, _base_name())
            buildah.build(role)
            _packages_note(role).write_text(packages)


def has_packages() -> bool:
    """Whether ``build_all`` has built every role's image on the present base with the present packages, from whichever code of ours."""
    notes = {role: _packages_note(role) for role in ROLES}
    return all(
        note.is_file() and note.read_text() == _packages_digest(role, _base_name())
        for role, note in notes.items()
    )


def _packages_note(role: str) -> Path:
    """Beside the store, with which it goes."""
    return cache.folder() / "buildah" / f"packages-{role}"


def _base_name() -> str:
    return f"localhost/scalerl-test-base:{cache.digest([_CERTIFICATES], _SUITE, *_PACKAGES)}"


def tag(role: str, base: str) -> str:
    """By what an image is made from."""
    instructions = _dockerfile(role).read_text()
    return cache.digest([_dockerfile(role), PROJECT / ".dockerignore", *_copied(instructions)], base)


def _dockerfile(role: str) -> Path:
    return PROJECT / f"Dockerfile.{role}"


def _copied(instructions: str) -> list[Path]:
    """What instructions of a Dockerfile copy of this tree, for CPUs."""
    lines = _COPY.findall(instructions.replace("${DEVICE}", "cpu"))
    return [PROJECT / name for line in lines for name in line.split()]


def _packages_digest(role: str, base: str) -> str:
    """By what an image's layers of packages are made from."""
    instructions = _dockerfile(role).read_text().partition(_OUR_CODE)[0]
    return cache.digest(_copied(instructions), base, instructions)


def _debootstrap(tree: Path, step: Step) -> None:
    argv = [debian.program("debootstrap"), "--variant=minbase", f"--include={','.join(_PACKAGES)}"]
    progress.followed(step, [*argv, _SUITE, str(tree), _mirror()])
    # Certificates of a proxy or mirror that this machine trusts; without them a build cannot fetch packages.
    shutil.copyfile(_CERTIFICATES, tree / _CERTIFICATES.relative_to("/"))
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists", "var/log"):
        shutil.rmtree(tree / folder)
        (tree / folder).mkdir()


def _mirror() -> str:
    """Where this machine's apt has Debian from."""
    formats = "$(SUITE) $(CODENAME) $(COMPONENT) $(CREATED_BY) $(SITE)"
    argv = ["apt-get", "indextargets", "--format", formats]
    if shutil.which(argv[0]) is None:
        raise MissingError("the base image is made with Debian's tools, and this machine has no apt-get")
    targets = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout
    for line in targets.splitlines():
        suite, codename, component, kind, site = line.split(maxsplit=4)
        if _SUITE in (suite, codename) and component == "main" and kind == "Packages":
            return site
    raise MissingError(f"this machine's apt knows no mirror of Debian {_SUITE}; add one to its sources")


@contextlib.contextmanager
def _package_index() -> Iterator[list[str]]:
    """Where this machine's pip and uv have packages from, for the time of a build: never in an image."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"pip.conf": Path(folder, "pip.conf"), "uv.toml": Path(folder, "uv.toml")}
        index = (
            _pip_setting("index-url") or os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
        )
        if index:
            files["pip.conf"].write_text(f"[global]\nindex-url = {index}\n")
            files["uv.toml"].write_text(f'index-url = "{index}"\n')
        for path in (Path("/etc/uv/uv.toml"), Path.home() / ".config/uv/uv.toml"):
            if path.exists():
                shutil.copyfile(path, files["uv.toml"])
        there = {name: path for name, path in files.items() if path.exists()}
        yield [word for name, path in there.items() for word in ("--secret", f"id={name},src={path}")]


def _pip_setting(name: str) -> str | None:
    argv = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    found = re.findall(rf"^[^=\n]*\.{name}='(.+)'$", done.stdout, re.MULTILINE)
    return found[-1] if found else None


@dataclass(frozen=True)
class Images:
    """Builds the project's images and gives them to a cluster.

    Into a cluster that is not ours nothing can be loaded; what its nodes pull is named by ``SCALERL_TEST_IMAGES``,
    like ``registry.example/scalerl-{role}:tag``.
    """

    cluster: Cluster

    def load(self, *roles: str) -> dict[str, str]:
        """Each role's image name, there to be run; all roles when none is named. Minutes once, seconds later."""
        roles = roles or ROLES
        named = os.environ.get(VARIABLE)
        if named:
            return {role: named.replace("{role}", role) for role in roles}
        if self.cluster.loader is None:
            raise MissingError(
                f"set {VARIABLE} to images that the cluster of {self.cluster.kubeconfig} can pull"
            )
        if self.cluster.layout is None:
            return {role: self._by_docker(role) for role in roles}
        buildah = Buildah.here()
        return {role: self._by_buildah(buildah, Loader(self.cluster.layout), role) for role in roles}

    def load_as_released(self) -> None:
        """Load the images by the names that the chart asks for with ``images.registry=localhost``."""
        chart = (PROJECT / "charts" / "scalerl" / "Chart.yaml").read_text()
        version = re.search(r"^appVersion: (\S+)$", chart, re.MULTILINE)
        assert version is not None
        released = {role: f"localhost/scalerl-{role}:{version[1]}" for role in ROLES}
        if self.cluster.layout is None:
            for role, name in released.items():
                self._by_docker(role, name)
            return
        for role, name in self.load().items():
            Loader(self.cluster.layout).name(name, released[role])

    def _by_buildah(self, buildah: Buildah, loader: Loader, role: str) -> str:
        there = loader.names()
        with buildah.lock():
            name = buildah.build(role, built=there)
            if name not in there:
                with progress.step(f"loading {name}"):
                    Built(buildah.store, name).load(loader)
        loader.remove(*(n for n in there if n.startswith(f"localhost/scalerl-{role}:") and n != name))
        return name

    def _by_docker(self, role: str, *also: str) -> str:
        name = f"localhost/scalerl-{role}:{tag(role, DEFAULT_BASE)}"
        build = ["docker", "build", "--file", f"Dockerfile.{role}", "--progress=plain"]
        build += [word for given in (name, *also) for word in ("--tag", given)]
        with (
            progress.step(f"building {name}") as step,
            tempfile.NamedTemporaryFile(suffix=".tar") as archive,
        ):
            save = ["docker", "save", "--output", archive.name, name, *also]
            for argv in ([*build, "--build-arg", "DEVICE=cpu", "."], save):
                progress.followed(step, argv, cwd=PROJECT, silent_seconds=_SECONDS)
            self.cluster.load_image(Path(archive.name))
        return name


def _instruction(line: str) -> str:
    """The instruction of a Dockerfile that a line of buildah announces."""
    return line[:80] if line.startswith("STEP") else ""
