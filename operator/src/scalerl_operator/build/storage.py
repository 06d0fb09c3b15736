"""What a run's pods read and write: its volume, its spec, its token."""

from __future__ import annotations

import base64

import yaml

from scalerl_api.paths import TRAINED_FILE
from scalerl_operator.names import SPEC_KEY, TOKEN_KEY
from scalerl_operator.build.quantities import canonical
from scalerl_operator.build.shared import Scope
from scalerl_operator.kube.types import Object


def claim(scope: Scope) -> Object | None:
    """The run's volume; None where the spec names one that exists.

    A claim to be retained has no owner, so nothing collects it. A field of the specification that cannot change
    (class, access mode, a smaller size) is the API server's to refuse.
    """
    storage = scope.spec.storage
    if storage.claim_name is not None:
        return None
    spec: Object = {
        "accessModes": [storage.access_mode],
        "resources": {"requests": {"storage": canonical(storage.size)}},
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": scope.metadata(scope.names.claim, owned=storage.on_delete == "Delete"),
        "spec": spec,
    }


def spec_map(scope: Scope, *, trained: bool) -> Object:
    """The run file that all roles read: name and spec with every default written out. Labels and annotations change
    for reasons of their own and no role reads them. Beside it, of a run that has steps, a file that says so."""
    manifest = scope.run.to_manifest()
    manifest["metadata"] = {"name": scope.run.metadata.name, "namespace": scope.namespace}
    # At every reconcile of every run: libyaml's writer, or this would be most of what a reconcile costs.
    text = yaml.dump(manifest, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": scope.metadata(scope.names.spec),
        "data": {SPEC_KEY: text, **({TRAINED_FILE: "true\n"} if trained else {})},
    }


def token_secret(scope: Scope, token: str) -> Object:
    """The run's bearer token."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": scope.metadata(scope.names.token),
        "type": "Opaque",
        "data": {TOKEN_KEY: base64.b64encode(token.encode()).decode()},
    }
