"""From the builder's store into the node's, moving only layers that the node does not have.

An image of gigabytes is two layers: packages, and our own code. The builder writes images into an OCI layout, a
folder with a file a layer, and writes no layer twice. The node takes an archive of such a layout; it is given one
that lacks the layers that it has. Then the layout's copies of them become links to the node's, so that each layer
is on the disk once in each form.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from testcluster import cache, runtime
from testcluster.runtime import Loader

_NAME = "io.containerd.image.name"
_ALGORITHM = "sha256:"


class Builder(Protocol):
    """What writes an image into a layout."""

    def export(self, name: str, folder: Path) -> None: ...


def load(builder: Builder, loader: Loader, name: str) -> None:
    """Move the image ``name``."""
    layout = cache.folder() / "layers"
    layout.mkdir(parents=True, exist_ok=True)
    (layout / "index.json").unlink(missing_ok=True)  # it would name images of earlier
    builder.export(name, layout)
    [manifest] = json.loads((layout / "index.json").read_text())["manifests"]
    manifest["annotations"] = {_NAME: name}
    loader.write(lambda into: _archive(into, layout, manifest))
    _link(layout)


def _archive(into: IO[bytes], layout: Path, manifest: dict[str, Any]) -> None:
    with tarfile.open(fileobj=into, mode="w|") as tar:
        _add_json(tar, "oci-layout", {"imageLayoutVersion": "1.0.0"})
        _add_json(tar, "index.json", {"schemaVersion": 2, "manifests": [manifest]})
        for digest in _blobs(layout, manifest["digest"]):
            if not runtime.has_blob(digest):
                tar.add(_file(layout, digest), arcname=f"blobs/sha256/{digest.removeprefix(_ALGORITHM)}")


def _blobs(layout: Path, manifest: str) -> Iterator[str]:
    """The manifest, and all that it names."""
    yield manifest
    content = json.loads(_file(layout, manifest).read_text())
    yield content["config"]["digest"]
    for layer in content["layers"]:
        yield layer["digest"]


def _link(layout: Path) -> None:
    for file in (layout / "blobs" / "sha256").iterdir():
        there = runtime.blob(_ALGORITHM + file.name)
        if there.exists() and file.is_symlink():
            continue
        file.unlink()
        if there.exists():  # else: of an image that the node no longer has
            file.symlink_to(there)


def _file(layout: Path, digest: str) -> Path:
    return layout / "blobs" / "sha256" / digest.removeprefix(_ALGORITHM)


def _add_json(tar: tarfile.TarFile, path: str, value: dict[str, Any]) -> None:
    content = json.dumps(value).encode()
    entry = tarfile.TarInfo(path)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
