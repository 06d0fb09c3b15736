"""The project's images as pods run them: not root, nothing writable but /tmp, every capability dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from installed import until
from testcluster import Cluster, MissingError
from testcluster.images import Buildah
from testcluster.runtime import Loader, busybox_archive

# What each is for, imported as its programs do; `absent` may not be in it.
IMPORTS = {
    "operator": "scalerl_operator.main scalerl_coordinator.main scalerl_curvefit.sidecar scalerl_cli.main",
    "trainer": "scalerl_trainer.main scalerl_trainer.prepare torch deepspeed obstore.store",
    "generator": "scalerl_generator.actor scalerl_generator.vllm_server vllm",
}
# Unpacked, without the base. What may be left out of the operator's image: Dockerfile.operator.
MEGABYTES = {"operator": 250}
SCRIPT = """
import importlib, importlib.metadata, importlib.util, json, os, pathlib, sys
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
print(json.dumps({
    "megabytes": megabytes("/opt"),
    "user": os.getuid(),
    "writable": [folder for folder in ("/", "/opt/scalerl", "/var/tmp", "/tmp") if writable(folder)],
    "home": os.path.expanduser("~"),
    "torch": importlib.util.find_spec("torch") is not None,
    "pip": importlib.util.find_spec("pip") is not None,
    "plugins": [point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")
        if point.value.startswith("scalerl")],
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
def test_a_restricted_pod_imports_what_its_role_needs(
    cluster: Cluster, images: dict[str, str], role: str
) -> None:
    cluster.apply(_pod(role, images[role]))
    name = f"pod/image-{role}"
    try:
        cluster.kubectl(
            "wait", name, "--for=jsonpath={.status.phase}=Succeeded", "--timeout=180s", seconds=190
        )
        said = json.loads(cluster.kubectl("logs", name).splitlines()[-1])
    except Exception as error:
        error.add_note(cluster.kubectl("logs", name, "--tail=20"))
        raise
    finally:
        cluster.kubectl("delete", name, "--grace-period=1")
    megabytes = said.pop("megabytes")
    print(f"{role}: {megabytes:.0f} MB unpacked, without its base")
    assert megabytes < MEGABYTES.get(role, float("inf"))
    assert said == {
        "user": 10001,
        "writable": ["/tmp"],
        "home": "/tmp/home",
        "torch": role != "operator",
        "pip": False,
        "plugins": ["scalerl_generator.vllm_worker:register"] if role == "generator" else [],
    }


def test_an_image_that_was_replaced_leaves_no_layers(cluster: Cluster) -> None:
    """Each change of the packages would leave gigabytes."""
    if cluster.layout is None:
        pytest.skip("this cluster's image store is not ours")
    loader, name = Loader(cluster.layout), "localhost/replaced:1"
    loader.write(lambda into: into.write(busybox_archive(name, ["false"])))
    digest = loader.names()[name]
    until(lambda: list(loader.names().values()).count(digest) == 2, 120, "the kubelet's name of it")
    loader.remove(name)
    assert digest not in loader.names().values()


def test_what_a_killed_build_left_is_removed() -> None:
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
