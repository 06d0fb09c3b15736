"""``scalerl submit``: validate, try on the API server, and apply."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scalerl_api.load import SpecError, SpecProblem, parse_objects, run_from_object
from scalerl_api.spec import API_VERSION
from scalerl_api.spec_warnings import cluster_warnings_of, warnings_of
from scalerl_cli.clusters.session import ClusterProblem, Session, explained, not_installed
from scalerl_cli.exits import BAD_INPUT, DONE, NOT_FOUND, Refused
from scalerl_cli.inputs import problems
from scalerl_cli.output import echo
from scalerl_operator.kube import errors
from scalerl_operator.kube.kinds import RUN, Kind
from scalerl_operator.kube.types import Object

_NAMESPACE: Final = "Namespace"
_CRD: Final = "CustomResourceDefinition"
_NEW_SECONDS: Final = 30.0
"""Longest time until the API server serves a new kind."""


@dataclass(frozen=True)
class _Document:
    """An object of a file, with the kind by which the cluster knows it."""

    obj: Object
    kind: Kind
    namespace: str | None

    @property
    def shown(self) -> str:
        name = "/".join(filter(None, (self.namespace, str(self.obj["metadata"]["name"]))))
        return f"{self.kind.name} {name}"


def submit(session: Session, arguments: argparse.Namespace) -> int:
    """Apply all documents of all files, or none if one is invalid or refused."""
    found = [(_shown(file), obj) for file in arguments.manifests for obj in read_objects(file)]
    invalid = [f"{source}: {one}" for source, obj in found for one in _problems(obj, session.namespace)]
    if invalid:
        raise Refused(*invalid, "nothing was applied")
    own_kinds = dict(kind for _, obj in found if obj["kind"] == _CRD for kind in _kinds_of(obj))
    own_namespaces = {obj["metadata"]["name"] for _, obj in found if obj["kind"] == _NAMESPACE}
    documents = [_document(session, source, obj, own_kinds, arguments.namespace) for source, obj in found]
    documents.sort(key=lambda document: document.kind.name not in (_CRD, _NAMESPACE))
    force = arguments.force_conflicts
    refused: ClusterProblem | None = None
    untried: list[_Document] = []
    for document in documents:
        try:
            session.apply(document.kind, document.namespace, document.obj, dry_run=True, force=force)
        except errors.ApiError as error:
            own_kind = (document.obj["apiVersion"], document.kind.name) in own_kinds
            if isinstance(error, errors.NotFound) and (own_kind or document.namespace in own_namespaces):
                untried.append(document)
                continue
            refused = _refusal(document, error)
            echo(str(refused), error=True)
    if refused is not None:
        raise ClusterProblem("nothing was applied", refused.code)
    for document in documents:
        if document.kind.name == RUN:
            spec = run_from_object(document.obj).spec
            for warning in (*warnings_of(spec), *cluster_warnings_of(spec)):
                echo(f"{document.shown}: warning: {warning}", error=True)
        if arguments.dry_run:
            tried = "accepted" if document not in untried else "not tried, as its namespace or kind is new"
            echo(f"{document.shown}: {tried} (dry run)")
            continue
        deadline = time.monotonic() + (_NEW_SECONDS if document in untried else 0.0)
        while True:
            try:
                session.apply(document.kind, document.namespace, document.obj, dry_run=False, force=force)
                break
            except errors.ApiError as error:
                if not isinstance(error, errors.NotFound) or time.monotonic() >= deadline:
                    raise _refusal(document, error) from error
                time.sleep(0.5)
        echo(f"{document.shown}: applied")
    return DONE


def _kinds_of(crd: Object) -> list[tuple[tuple[str, str], Kind]]:
    """The kinds of a CRD, by apiVersion and kind.

    Raises:
        ClusterProblem: it is no CRD.
    """
    try:
        spec = crd["spec"]
        name, plural = spec["names"]["kind"], spec["names"]["plural"]
        namespaced = spec["scope"] == "Namespaced"
        versions = [f"{spec['group']}/{version['name']}" for version in spec["versions"]]
    except (KeyError, TypeError) as error:
        raise ClusterProblem(
            f"{_CRD} {crd['metadata']['name']}: {error} is missing in spec", BAD_INPUT
        ) from error
    return [((version, name), Kind(name, version, plural, namespaced=namespaced)) for version in versions]


def _shown(file: str) -> str:
    return "standard input" if file == "-" else file


def read_objects(file: str) -> list[Object]:
    """The objects of a file; ``-`` is standard input. Raises ClusterProblem and SpecError."""
    source = _shown(file)
    try:
        if file == "-":
            return parse_objects(sys.stdin.buffer.read().decode("utf-8"), source)
        return parse_objects(Path(file).read_text(encoding="utf-8"), source)
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterProblem(f"{source}: {getattr(error, 'strerror', None) or error}", BAD_INPUT) from error


def _problems(obj: Object, namespace: str) -> list[SpecProblem]:
    """Problems that `scalerl validate` finds, without those that need the files of the pods; of other kinds, only a missing
    name."""
    metadata = obj.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        return [SpecProblem("metadata.name", "required, but not given")]
    if not isinstance(obj.get("kind"), str) or not isinstance(obj.get("apiVersion"), str):
        return [SpecProblem("kind", "apiVersion and kind are required")]
    if obj["kind"] != RUN:
        return []
    try:
        run = run_from_object({**obj, "metadata": {"namespace": namespace, **metadata}})
    except SpecError as error:
        return error.problems
    return problems(run, thorough=True, machine=False, files=False)


def _document(
    session: Session, source: str, obj: Object, own_kinds: Mapping[tuple[str, str], Kind], only: str | None
) -> _Document:
    """An object with its kind. own_kinds: of CRDs of the submission. only: the namespace of ``-n``, which others contradict."""
    version, name = obj["apiVersion"], obj["kind"]
    kind = session.kind(version, name) or own_kinds.get((version, name))
    if kind is None:
        is_run = (version, name) == (API_VERSION, RUN)
        missing = not_installed() if is_run else f"the cluster has no {name} of {version}"
        raise ClusterProblem(f"{source}: {missing}", NOT_FOUND)
    given = obj["metadata"].get("namespace")
    if kind.namespaced and only and given and given != only:
        raise ClusterProblem(
            f"{source}: {name} {obj['metadata']['name']} has the namespace {given}, not {only} of -n: leave out one of them",
            BAD_INPUT,
        )
    namespace = (given or session.namespace) if kind.namespaced else None
    return _Document(obj, kind, namespace)


def _refusal(document: _Document, error: errors.ApiError) -> ClusterProblem:
    """What the API server says, field by field."""
    found = explained(error)
    text, code = str(found), found.code
    if isinstance(error, errors.Invalid) and error.causes:
        text = "refused: " + "; ".join(f"{cause.field}: {cause.message}" for cause in error.causes)
    elif isinstance(error, errors.Conflict):
        text, code = f"{error.message}; --force-conflicts takes these fields over", BAD_INPUT
    return ClusterProblem(f"{document.shown}: {text}", code)
