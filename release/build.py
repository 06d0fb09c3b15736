"""Everything of one release, made from the last commit, in a folder of its own::

wheels/                  the members, and `scalerl`, which requires all of them at its version
requirements/            control, cpu and gpu: every package and these wheels, with hashes
sbom/                    the same as CycloneDX
scalerl-VERSION.tgz      the chart; scalerl-VERSION.oci.tar: as an OCI archive
images.yaml              values for the chart: the images by digest; only with ``--registry``, to which they are pushed
site/                    versions.json, and the documentation in VERSION/
examples.tar.gz
SHA256SUMS
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml
from chart import write_oci_archive
from version import MEMBERS, ROOT, found, released

BIN = Path(sys.executable).parent
ROLES = ("operator", "trainer", "generator")
IN_CONTROL = frozenset(MEMBERS) - {"trainer", "generator"}
"""What requirements/control.txt is for, which has no torch."""


class ReleaseError(Exception):
    """Why there is no release, and what to do."""


def release(into: Path, registry: str = "", device: str = "") -> None:
    """Make it in the folder ``into``, which must not exist.

    Raises:
        ReleaseError: something is uncommitted, missing, or does not agree.
        subprocess.CalledProcessError: a tool failed; it said why.
    """
    if _output("git", "status", "--porcelain"):
        raise ReleaseError("there are uncommitted changes; a release is made from a commit")
    version = agreed()
    os.environ["SOURCE_DATE_EPOCH"] = _output("git", "log", "-1", "--format=%ct")
    into.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        _archive(source / "source.tar")
        with tarfile.open(source / "source.tar") as tar:
            tar.extractall(source, filter="data")
        _archive(into / "examples.tar.gz", "examples")
        wheels(source, into / "wheels")
        requirements(source, into)
        package_chart(source, into)
        site(source, into / "site", version)
        if registry:
            (into / "images.yaml").write_text(images(source, registry, version, device))
        else:
            print("no images: name a registry to push them to (IMAGES=registry.example.com/team)")
    sums = "".join(f"{_sha256(path)}  {path.relative_to(into)}\n" for path in _files(into))
    (into / "SHA256SUMS").write_text(sums)


def agreed() -> str:
    """The one version of all places.

    Raises:
        ReleaseError: they do not agree.
    """
    version = released()[0]
    others = {name: sorted(versions) for name, versions in found().items() if versions != {version}}
    if others:
        raise ReleaseError(f"CHANGELOG.md begins with {version}, but: {others}; see release/version.py")
    if f"## {version} (unreleased)" in (ROOT / "CHANGELOG.md").read_text():
        print(f"a trial: CHANGELOG.md says that {version} is unreleased")
    return version


def wheels(source: Path, into: Path) -> None:
    """Build them, and compare each with the tracked files.

    Raises:
        ReleaseError: a file is missing in a wheel.
    """
    for member in (*MEMBERS, "release"):
        shutil.copy(source / "LICENSE", source / member)
        options = ("--wheel", "-q", "--no-build-isolation", "--python", sys.executable)
        _run(BIN / "uv", "build", *options, "--out-dir", into, source / member)
        (wheel,) = into.glob(f"scalerl{'' if member == 'release' else f'_{member}'}-*.whl")
        tracked = {name.removeprefix(f"{member}/src/") for name in files_of(member)}
        with zipfile.ZipFile(wheel) as zipped:
            missing = tracked - set(zipped.namelist())
        if missing:
            raise ReleaseError(f"{wheel.name} lacks {sorted(missing)}; add them to {member}/pyproject.toml")
    (into / ".gitignore").unlink(missing_ok=True)


def files_of(member: str) -> list[str]:
    """What is tracked in its src."""
    return _output("git", "ls-files", f"{member}/src").splitlines()


def requirements(source: Path, into: Path) -> None:
    """The locks with the wheels in them, and their bills of materials."""
    (into / "requirements").mkdir()
    (into / "sbom").mkdir()
    tool = source / "sbom"
    _run(BIN / "uv", "venv", "-q", "--python", sys.executable, tool)
    locked = source / "requirements/sbom.txt"
    _run(BIN / "uv", "pip", "sync", "-q", "--python", tool / "bin/python", "--require-hashes", locked)
    built = {path.name.split("-")[0]: path for path in (into / "wheels").iterdir()}
    version = built["scalerl"].name.split("-")[1]
    for lock in ("control", "cpu", "gpu"):
        text = (source / f"requirements/{lock}.txt").read_text()
        names = sorted(IN_CONTROL if lock == "control" else MEMBERS)
        for name, wheel in [(f"scalerl-{name}", built[f"scalerl_{name}"]) for name in names] + [
            ("scalerl", built["scalerl"])
        ]:
            text += f"{name}=={version} \\\n    --hash=sha256:{_sha256(wheel)}\n"
        file = into / "requirements" / f"{lock}.txt"
        file.write_text(text)
        project = source / "release/pyproject.toml"
        options = ("--output-reproducible", "--pyproject", project, "-o", into / "sbom" / f"{lock}.cdx.json")
        _run(tool / "bin/python", "-W", "ignore", "-m", "cyclonedx_py", "requirements", *options, file)


def package_chart(source: Path, into: Path) -> None:
    """``helm package``, and the same as an OCI archive."""
    chart = source / "charts/scalerl"
    _run(_helm(), "package", "-d", into, chart)
    metadata = yaml.safe_load((chart / "Chart.yaml").read_text())
    name = f"{metadata['name']}-{metadata['version']}"
    print("chart", write_oci_archive(into / f"{name}.tgz", metadata, into / f"{name}.oci.tar"))


def _helm() -> str:
    """From the path, or as tests build it."""
    return shutil.which("helm") or _output(
        sys.executable, str(ROOT / "tests/cluster/cluster.py"), "tool", "helm"
    )


def site(source: Path, into: Path, version: str) -> None:
    """The documentation in a folder of its version, which ``versions.json`` offers beside earlier ones."""
    config = source / "mkdocs-version.yml"
    # The theme's selector of versions reads ../versions.json.
    config.write_text("INHERIT: mkdocs.yml\nextra: {version: {provider: mike}}\n")
    _run(BIN / "mkdocs", "build", "-q", "-f", config, "-d", (into / version).resolve(), cwd=source)
    listed = [{"version": one, "title": one, "aliases": []} for one in released(source)]
    (into / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")


def images(source: Path, registry: str, version: str, device: str) -> str:
    """Build and push the three images; values for the chart that name them by digest."""
    docker = (
        bool(shutil.which("docker"))
        and subprocess.run(["docker", "info"], capture_output=True).returncode == 0
    )
    builder = "docker" if docker else "buildah"
    if shutil.which(builder) is None:
        raise ReleaseError("neither docker nor buildah is here; install one, or leave out IMAGES")
    registry = registry.rstrip("/")
    words = [f"IMAGE_BUILDER={builder}", f"IMAGE_PREFIX={registry}/scalerl-", f"TAG={version}"]
    _run("make", "images", *words, *([f"DEVICE={device}"] if device else []), cwd=source)
    values: dict[str, object] = {"registry": registry}
    for role in ROLES:
        digest = push(builder, f"{registry}/scalerl-{role}", version)
        values[role] = {"repository": f"scalerl-{role}", "digest": digest}
    return str(yaml.safe_dump({"images": values}, sort_keys=False))


def push(builder: str, repository: str, tag: str) -> str:
    """Push an image; its digest in the registry."""
    if builder == "docker":
        _run("docker", "push", f"{repository}:{tag}")
        form = "{{range .RepoDigests}}{{println .}}{{end}}"
        listed = _output("docker", "image", "inspect", "-f", form, f"{repository}:{tag}").split()
        (digest,) = (one.partition("@")[2] for one in listed if one.startswith(f"{repository}@"))
        return digest
    with tempfile.NamedTemporaryFile("r") as file:
        _run("buildah", "push", "--digestfile", file.name, f"{repository}:{tag}")
        return file.read().strip()


def _archive(into: Path, *paths: str) -> None:
    _run("git", "archive", "-o", into.resolve(), "HEAD", *paths, cwd=ROOT)


def _run(*words: str | Path, cwd: Path = ROOT) -> None:
    subprocess.run([str(word) for word in words], cwd=cwd, check=True)


def _output(*words: str) -> str:
    done = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, help="folder, emptied first (default: dist/VERSION)")
    parser.add_argument("--registry", default="", help="push images there: registry.example.com/team")
    parser.add_argument(
        "--device", default="", choices=("", "cpu", "gpu"), help="of the images (default: gpu)"
    )
    arguments = parser.parse_args()
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    try:
        into = arguments.into or ROOT / "dist" / agreed()
        shutil.rmtree(into, ignore_errors=True)
        release(into, arguments.registry, arguments.device)
    except (ReleaseError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    print(f"{into}: check it with `make release-check`")


if __name__ == "__main__":
    main()
