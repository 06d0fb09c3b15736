"""The project's images as pods run them: not root, nothing writable but /tmp, every capability dropped."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from installed import until
from testcluster import Cluster, MissingError, debian
from testcluster.images import Buildah
from testcluster.runtime import Loader, busybox_archive

# What each is for, imported as its programs do; `absent` may not be in it.
IMPORTS = {
    "operator": "scalerl_operator.main scalerl_coordinator.main scalerl_curvefit.sidecar scalerl_cli.main",
    "trainer": "scalerl_trainer.main scalerl_trainer.prepare torch deepspeed obstore.store",
    "generator": "scalerl_generator.actor scalerl_generator.vllm_server vllm obstore.store",
}
# Unpacked, without the base. The Dockerfiles say what they remove from packages.
MEGABYTES = {"operator": 360, "trainer": 5000, "generator": 5000}
SCRIPT = """
import importlib, importlib.metadata, importlib.util, json, mmap, os, pathlib, struct, sys
for name in sys.argv[1].split():
    importlib.import_module(name)
def writable(folder):
    try:
        pathlib.Path(folder, "written").touch()
    except OSError:
        return False
    return True
def megabytes(folder):
    return sum(file.lstat().st_size for file in pathlib.Path(folder).rglob("*") if not file.is_dir()) / 1e6
def needed(library):  # the names in its DT_NEEDED; the layout is that of elf(5)
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:5] != b"\\x7fELF\\x02":
            return
        (start,), (count,) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<H", data, 60)
        sections = [struct.unpack_from("<IIQQQQI", data, start + 64 * n) for n in range(count)]
        for _, kind, _, _, offset, size, link in sections:
            for tag, value in struct.iter_unpack("<qQ", data[offset:offset + size]) if kind == 6 else ():
                if tag == 1:
                    name = sections[link][4] + value
                    yield data[name:data.find(b"\\0", name)].decode()
libraries = [file for file in pathlib.Path("/opt").rglob("*.so*") if file.is_file() and not file.is_symlink()]
removed = {file.name for package in importlib.metadata.distributions() for file in package.files or ()
    if ".so" in file.name and not file.locate().exists()}
print(json.dumps({
    "megabytes": megabytes("/opt"),
    "needs": sum(1 for library in libraries for _ in needed(library)),
    "broken": [f"{library} needs {name}" for library in libraries for name in needed(library) if name in removed],
    "user": os.getuid(),
    "writable": [folder for folder in ("/", "/opt/scalerl", "/var/tmp", "/tmp") if writable(folder)],
    "home": os.path.expanduser("~"),
    "torch": importlib.util.find_spec("torch") is not None,
    "pip": importlib.util.find_spec("pip") is not None,
    "plugins": [point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.value.startswith("scalerl")],
    "sources": [point.name for point in importlib.metadata.entry_points(group="scalerl.sources")],
}))
"""


def _pod(role: str, image: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"image-{role}"},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "volumes": [{"name": "tmp", "emptyDir": {}}],
            "containers": [
                {
                    "name": role,
                    "image": image,
                    "command": ["python", "-c", SCRIPT, IMPORTS[role]],
                    "env": [{"name": "DS_ACCELERATOR", "value": "cpu"}],
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                    },
                }
            ],
        },
    }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("role", IMPORTS)
def test_restricted_pod_imports_what_its_role_needs(
    cluster: Cluster, images: dict[str, str], role: str
) -> None:
    cluster.apply(_pod(role, images[role]))
    name = f"pod/image-{role}"
    try:
        cluster.kubectl(
            "wait", name, "--for=jsonpath={.status.phase}=Succeeded", "--timeout=900s", seconds=950
        )
        said = json.loads(cluster.kubectl("logs", name).splitlines()[-1])
    except Exception as error:
        error.add_note(cluster.kubectl("logs", name, "--tail=20"))
        raise
    finally:
        cluster.kubectl("delete", name, "--grace-period=1")
    megabytes = said.pop("megabytes")
    print(f"{role}: {megabytes:.0f} MB unpacked, without its base")
    assert said.pop("needs") > 100
    assert megabytes < MEGABYTES.get(role, float("inf"))
    assert said == {
        "user": 10001,
        "writable": ["/tmp"],
        "home": "/tmp/home",
        "broken": [],
        "torch": role != "operator",
        "pip": False,
        "plugins": ["scalerl_generator.vllm_worker:register"] if role == "generator" else [],
        "sources": ["opgraph"],
    }


def test_image_that_was_replaced_leaves_no_layers(cluster: Cluster) -> None:
    """Each change of the packages would leave gigabytes."""
    if cluster.layout is None:
        pytest.skip("this cluster's image store is not ours")
    loader, name = Loader(cluster.layout), "localhost/replaced:1"
    loader.write(lambda into: into.write(busybox_archive(name, ["false"])))
    digest = loader.names()[name]
    until(lambda: list(loader.names().values()).count(digest) == 2, 120, "the kubelet's name of it")
    loader.remove(name)
    assert digest not in loader.names().values()


def test_leftovers_of_a_killed_import_are_removed(cluster: Cluster) -> None:
    if cluster.layout is None:
        pytest.skip("this cluster's image store is not ours")
    address = str(cluster.layout.containerd_socket)
    ctr = (debian.program("ctr"), "--address", address, "--namespace", "k8s.io")

    def leases() -> list[str]:
        argv = [*ctr, "leases", "list", "--quiet"]
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.split()

    with subprocess.Popen([*ctr, "images", "import", "-"], stdin=subprocess.PIPE) as killed:
        until(lambda: leases() != [], 120, "the import's lease")
        killed.kill()
    assert leases()
    Loader(cluster.layout).sweep()
    assert leases() == []


def test_leftovers_of_a_killed_build_are_removed() -> None:
    try:
        buildah = Buildah.here()
    except MissingError as error:
        pytest.skip(f"no images can be made here: {error}")
    with buildah.lock():
        left = buildah.run("from", "scratch").strip()
        aside = buildah.root / "tmp" / "of-a-killed-build"
        aside.mkdir(parents=True)
        assert left in buildah.run("containers", "--format", "{{.ContainerName}}")
        buildah.sweep()
        assert buildah.run("containers", "--quiet").strip() == ""
        assert not aside.exists()


# As those of trainer and generator: packages that two stages share, and a stage whose files are copied.
DOCKERFILE = """
FROM scratch AS packages
COPY packages /packages
FROM packages AS members
COPY code /built/code
FROM packages
COPY --from=members /built /members
CMD ["/members/code"]
"""


def test_layers_that_no_image_is_made_of_are_removed() -> None:
    """A lock that changes leaves packages of gigabytes behind."""
    try:
        kept = Buildah.here().root
    except MissingError as error:
        pytest.skip(f"no images can be made here: {error}")
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        buildah, context = Buildah(Path(folder)), Path(folder, "context")
        context.mkdir()

        def build(role: str, version: int) -> None:
            (context / "Dockerfile").write_text(DOCKERFILE)
            (context / "packages").write_text(f"packages {version}")
            (context / "code").write_text(f"{role} {version}")
            buildah.run("build", "--layers", "--tag", f"localhost/scalerl-{role}:{version}", context)

        def packages() -> set[str]:
            files = buildah.store.glob("overlay/*/diff/packages")
            return {file.read_text() for file in files}

        build("trainer", 1)
        build("generator", 1)
        build("trainer", 2)
        buildah.forget("trainer", but="localhost/scalerl-trainer:2")
        assert packages() == {"packages 1", "packages 2"}  # the generator's image is made of the first
        build("generator", 2)
        buildah.forget("generator", but="localhost/scalerl-generator:2")
        assert packages() == {"packages 2"}
        assert buildah.has("localhost/scalerl-trainer:2")
        assert buildah.has("localhost/scalerl-generator:2")
