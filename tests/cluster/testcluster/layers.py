"""From the builder's store into the node's, moving only layers that the node does not have.

An image of gigabytes is two layers: packages, and our own code. The node takes an archive of an OCI layout, and is
given one that lacks the layers it has. The archive is written from the builder's store straight into the node's:
exporting an image the usual way would compress all of it, every time, and put it on the disk once more.
"""

from __future__ import annotations

import base64
import io
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from testcluster import runtime, tools
from testcluster.errors import ClusterError
from testcluster.runtime import Loader

_ALGORITHM = "sha256:"
_NAME = "io.containerd.image.name"


@dataclass(frozen=True)
class Built:
    """An image in a store of containers/storage, which buildah keeps."""

    store: Path
    name: str

    def load(self, loader: Loader) -> None:
        """Give it to a node."""
        loader.write(self._archive)

    def _archive(self, into: IO[bytes]) -> None:
        manifest = self._data("manifest")
        described = json.loads(manifest)
        with tarfile.open(fileobj=into, mode="w|") as tar:
            _add(tar, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
            _add(tar, "index.json", json.dumps(self._index(manifest, described)).encode())
            digest = self._image()["digest"]
            _add(tar, _blob(digest), manifest)
            config = described["config"]["digest"]
            _add(tar, _blob(config), self._data(config))
            for layer in described["layers"]:
                if not runtime.has_blob(layer["digest"]):
                    self._add_layer(tar, layer)

    def _index(self, manifest: bytes, described: dict[str, Any]) -> dict[str, Any]:
        entry = {
            "mediaType": described["mediaType"],
            "digest": self._image()["digest"],
            "size": len(manifest),
            "annotations": {_NAME: self.name},
        }
        return {"schemaVersion": 2, "manifests": [entry]}

    def _add_layer(self, tar: tarfile.TarFile, layer: dict[str, Any]) -> None:
        layers = json.loads((self.store / "overlay-layers" / "layers.json").read_text())
        known = next((kept["id"] for kept in layers if kept.get("diff-digest") == layer["digest"]), None)
        if known is None:
            raise ClusterError(f"{self.store} lacks the layer {layer['digest']} of {self.name}")
        argv = [tools.tool("kube"), "layer", self.store, known]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            entry = tarfile.TarInfo(_blob(layer["digest"]))
            entry.size = layer["size"]
            tar.addfile(entry, reader.stdout)
        if reader.returncode != 0:
            raise ClusterError(f"layer {known} of {self.store} cannot be read")

    def _image(self) -> dict[str, Any]:
        images: list[dict[str, Any]] = json.loads((self.store / "overlay-images" / "images.json").read_text())
        for image in images:
            if self.name in (image.get("names") or ()):
                return image
        raise ClusterError(f"{self.store} has no image {self.name}")

    def _data(self, key: str) -> bytes:
        """What the store keeps beside an image: files whose names are encoded unless they are plain words."""
        name = key if key.isalnum() else "=" + base64.b64encode(key.encode()).decode()
        return (self.store / "overlay-images" / self._image()["id"] / name).read_bytes()


def _blob(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix(_ALGORITHM)}"


def _add(tar: tarfile.TarFile, path: str, content: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
