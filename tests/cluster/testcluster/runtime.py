"""The node's image store: what gets into it, and how. It outlives clusters."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from testcluster import cache, debian
from testcluster.errors import ClusterError
from testcluster.handle import Cluster
from testcluster.layout import Layout
from testcluster.node import PAUSE_IMAGE

BUSYBOX_IMAGE = "localhost/busybox:1"
NOT_ROOT = 10001
_CONTENT = "io.containerd.content.v1.content/blobs/sha256"
_DIGEST = "sha256:"
_IMPORT_SECONDS = 900


def store() -> Path:
    """containerd's root folder."""
    path = cache.folder() / "containerd" / "root"
    path.mkdir(parents=True, exist_ok=True)
    return path


def has_blob(digest: str) -> bool:
    """Whether the store holds the blob ``sha256:...``."""
    return (store() / _CONTENT / digest.removeprefix("sha256:")).exists()


@dataclass(frozen=True)
class Loader:
    """Gives images to the containerd of a cluster."""

    layout: Layout

    def __call__(self, archive: Path) -> None:
        self._ctr("images", "import", str(archive))

    def names(self) -> dict[str, str]:
        """The names of all images it has, each with its image's digest."""
        rows = [row.split() for row in self._ctr("images", "list").splitlines()[1:]]
        return {row[0]: row[2] for row in rows}

    def name(self, image: str, also: str) -> None:
        """Call ``image`` by one more name, which another image may have had."""
        self._ctr("images", "tag", "--force", image, also)

    def remove(self, *names: str) -> None:
        """Forget names; layers that none needs any more go with them.

        containerd's kubelet side calls each image by its own digest too, and keeps that name when the others go.
        """
        all_ = self.names()
        kept = {of for name, of in all_.items() if not name.startswith(_DIGEST) and name not in names}
        nameless = [name for name, of in all_.items() if name.startswith(_DIGEST) and of not in kept]
        if names or nameless:
            self._ctr("images", "remove", "--sync", *names, *nameless)

    def sweep(self) -> None:
        """Remove what imports that were killed have left: leases, which for a day keep gigabytes each.

        For a node that has just started: no other process imports.
        """
        for lease in self._ctr("leases", "list", "--quiet").split():
            self._ctr("leases", "delete", "--sync", lease)

    def write(self, archive: Callable[[IO[bytes]], object]) -> None:
        """Load what ``archive`` writes into the file it is given; nothing of it lies on the disk on its way."""
        with tempfile.TemporaryFile() as said, self._popen(said, "images", "import", "-") as ctr:
            watch = threading.Timer(_IMPORT_SECONDS, ctr.kill)
            watch.start()
            try:
                assert ctr.stdin is not None
                with contextlib.suppress(BrokenPipeError), ctr.stdin:  # its exit says why it stopped reading
                    archive(ctr.stdin)
                code = ctr.wait()
            finally:
                watch.cancel()
            if code != 0:
                said.seek(0)
                raise ClusterError(f"`ctr images import` exited {code}: {said.read().decode()[-2000:]}")

    def _ctr(self, *words: str) -> str:
        done = subprocess.run(self._argv(*words), capture_output=True, text=True, timeout=_IMPORT_SECONDS)
        if done.returncode != 0:
            raise ClusterError(
                f"`ctr {' '.join(words)}` exited {done.returncode}: {done.stderr.strip()[-2000:]}"
            )
        return done.stdout

    def _popen(self, said: IO[bytes], *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._argv(*words), stdin=subprocess.PIPE, stdout=said, stderr=said)

    def _argv(self, *words: str) -> list[str]:
        address = str(self.layout.containerd_socket)
        return [debian.program("ctr"), "--address", address, "--namespace", "k8s.io", *words]


def load_basic_images(cluster: Cluster) -> None:
    """pause, which every pod has, and busybox with bash for tests."""
    assert cluster.layout is not None
    loader = Loader(cluster.layout)
    loader.sweep()
    for name, command in ((PAUSE_IMAGE, ["sleep", "2000000000"]), (BUSYBOX_IMAGE, ["sh"])):
        loader.write(lambda into, of=(name, command): into.write(busybox_archive(*of)))


def _libraries(program: Path) -> Iterator[Path]:
    """What a program is linked with, its loader too."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True, timeout=120).stdout
    for line in said.splitlines():
        yield from (Path(word) for word in line.split() if word.startswith("/"))


def busybox_archive(name: str, command: list[str]) -> bytes:
    """A docker archive of one layer.

    A static busybox crashes when it looks a name up, in `wget` as in `nc`; bash's ``/dev/tcp/HOST/PORT`` works.
    """
    busybox, bash = Path("/bin/busybox"), Path("/bin/bash")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True, timeout=120)
    users = f"root:x:0:0::/:/bin/sh\nuser:x:{NOT_ROOT}:{NOT_ROOT}::/tmp:/bin/sh\n"
    files = io.BytesIO()
    with tarfile.open(fileobj=files, mode="w") as tar:
        for folder, mode in (("bin", 0o755), ("etc", 0o755), ("tmp", 0o1777)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        _add(tar, "etc/passwd", users.encode(), 0o644)
        for file in (busybox, bash, *_libraries(bash)):
            _add(tar, str(file).lstrip("/"), file.read_bytes(), 0o755)
        for applet in applets.stdout.split():
            if applet not in ("busybox", "bash"):
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
    layer = files.getvalue()
    config = json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
            "os": "linux",
            "config": {"Cmd": command, "Env": ["PATH=/bin"], "User": str(NOT_ROOT)},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    manifest = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in (("layer.tar", layer), ("config.json", config), ("manifest.json", manifest)):
            _add(tar, path, content, 0o644)
    return archive.getvalue()


def _add(tar: tarfile.TarFile, path: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(path)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
