"""A packaged chart as an OCI archive: what a registry holds of it, in a tar file (OCI image layout 1.0).

oras or skopeo copy it into a registry, of which ``helm install oci://REGISTRY/scalerl`` takes it. Media types: https://helm.sh/docs/topics/registries/.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.cncf.helm.config.v1+json"
_CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


def write_oci_archive(packaged: Path, metadata: dict[str, Any], archive: Path) -> str:
    """Write it for what ``helm package`` made; ``metadata``: of Chart.yaml. Returns the digest of its manifest."""
    blobs: dict[str, bytes] = {}

    def descriptor(media_type: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    manifest = descriptor(
        MANIFEST,
        _json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": descriptor(_CONFIG, _json(metadata)),
                "layers": [descriptor(_CONTENT, packaged.read_bytes())],
                "annotations": {
                    "org.opencontainers.image.title": metadata["name"],
                    "org.opencontainers.image.version": metadata["version"],
                },
            }
        ),
    )
    tag = {"annotations": {"org.opencontainers.image.ref.name": metadata["version"]}}
    with tarfile.open(archive, "w") as tar:
        for name, data in {
            "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
            "index.json": _json({"schemaVersion": 2, "manifests": [manifest | tag]}),
            **{f"blobs/sha256/{digest}": data for digest, data in blobs.items()},
        }.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return str(manifest["digest"])


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
