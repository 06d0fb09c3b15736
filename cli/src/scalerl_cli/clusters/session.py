"""The user's connection to a cluster: kubeconfig, context and namespace as kubectl has them, and typed errors."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import urllib3
import yaml
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config.kube_config import KubeConfigMerger
from kubernetes.stream import ws_client
from websocket import ABNF, WebSocketBadStatusException, WebSocketException

from scalerl_api.spec import API_VERSION, GROUP
from scalerl_cli.exits import BAD_INPUT, FAILED, FORBIDDEN, NOT_FOUND, Refused
from scalerl_operator.kube import errors
from scalerl_operator.kube.kinds import RUN, Kind, kind_of
from scalerl_operator.kube.types import Object

FIELD_OWNER: Final = "scalerl-cli"
SECONDS: Final = (10.0, 60.0)
"""Timeouts of a connection and of a response."""
IDLE_SECONDS: Final = 120.0
"""Longest time without a byte of an executed command."""
PAGE: Final = 500
NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_METHODS: Final = {"create": "POST", "delete": "DELETE", "apply": "PATCH"}
_STDOUT, _STDERR, _RESULT = 1, 2, 3
_MAX_STDERR: Final = 4096


class ClusterProblem(Refused):
    """A command for a cluster cannot go on."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message, code=code)


class Interrupted(Exception):
    """A connection ended before its end."""


class Session:
    """Requests to one API server, one at a time. All raise :class:`~scalerl_operator.kube.errors.ApiError`.

    Args:
        namespace: of the command: ``-n``, else that of the context, else ``default``.
        seconds: timeouts of a connection and of a response.
    """

    def __init__(
        self, configuration: Configuration, namespace: str, seconds: tuple[float, float] = SECONDS
    ) -> None:
        self._client = ApiClient(configuration)
        self._configuration = configuration
        self.namespace = namespace
        self._seconds = seconds

    # --- objects ---------------------------------------------------------------------------------

    def get(self, kind: Kind | str, namespace: str | None, name: str) -> Object | None:
        """The object; None if it does not exist."""
        try:
            return self._object("get", kind, namespace, name)
        except errors.NotFound:
            return None

    def list(self, kind: Kind | str, namespace: str | None, labels: str = "") -> list[Object]:
        """All objects of a kind in a namespace; None: in all. NotFound: the cluster does not have the kind."""
        query = {"limit": str(PAGE)}
        query |= {"labelSelector": labels} if labels else {}
        found: list[Object] = []
        while True:
            page = self._object("list", kind, namespace, query=query)
            found += page.get("items") or ()
            query["continue"] = (page.get("metadata") or {}).get("continue") or ""
            if not query["continue"]:
                return found

    def create(self, kind: str, namespace: str, body: Object) -> Object:
        return self._object("create", kind, namespace, body=body)

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object at once; one that is gone is no error."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
        with suppress(errors.NotFound):
            self._object("delete", kind, namespace, name, body)

    def apply(self, kind: Kind, namespace: str | None, body: Object, *, dry_run: bool, force: bool) -> Object:
        """Server-side apply as ``scalerl-cli``."""
        query = {"fieldManager": FIELD_OWNER, "fieldValidation": "Strict", "force": str(force).lower()}
        query |= {"dryRun": "All"} if dry_run else {}
        name = str(body["metadata"]["name"])
        return self._object("apply", kind, namespace, name, body, query)

    def kind(self, api_version: str, name: str) -> Kind | None:
        """A kind of this cluster, by its own list of kinds; None: the cluster does not have it."""
        path = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
        try:
            found = self.raw(path, f"discover {api_version}")
        except errors.NotFound:
            return None
        for resource in found.get("resources") or ():
            if resource["kind"] == name and "/" not in resource["name"]:
                return Kind(name, api_version, resource["name"], namespaced=resource["namespaced"])
        return None

    def _object(
        self,
        verb: str,
        kind: Kind | str,
        namespace: str | None,
        name: str | None = None,
        body: Object | None = None,
        query: Mapping[str, str] = {},
    ) -> Object:
        kind = kind_of(kind) if isinstance(kind, str) else kind
        what = " ".join(filter(None, (verb, _resource(kind), _where(namespace, name))))
        return self.raw(kind.path(namespace, name), what, _METHODS.get(verb, "GET"), query, body)

    def raw(
        self,
        path: str,
        what: str,
        method: str = "GET",
        query: Mapping[str, str] = {},
        body: Object | None = None,
    ) -> Object:
        """The object at a path. what: of the request, for messages."""
        response = self._send(method, path, what, query, body)
        with _translated(what):
            found: Object = json.loads(response.read())
        return found

    def _send(
        self,
        method: str,
        path: str,
        what: str,
        query: Mapping[str, str],
        body: Object | None = None,
        *,
        endless: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        content = "application/apply-patch+yaml" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json", "Content-Type": content, "User-Agent": FIELD_OWNER}
        with _translated(what):
            self._authorize(headers)
            url = f"{self._configuration.host.rstrip('/')}{path}{f'?{urlencode(query)}' if query else ''}"
            seconds = (self._seconds[0], None if endless else self._seconds[1])
            answer = self._client.call_api(method, url, headers, body=body, _request_timeout=seconds)
            response: urllib3.BaseHTTPResponse = answer.response
            data = response.read() if response.status >= 400 else b""
        if response.status >= 400:
            raise errors.from_status(response.status, errors.decode(data), what=what, retry_after=None)
        return response

    def _authorize(self, headers: dict[str, str]) -> None:
        self._client.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)

    # --- pods ------------------------------------------------------------------------------------

    def log(self, namespace: str, pod: str, query: Mapping[str, str], *, follow: bool) -> Iterator[bytes]:
        """Lines of a container's log, without their ends."""
        what = f"get pods/log {namespace}/{pod}"
        path = kind_of("Pod").path(namespace, pod, "log")
        response = self._send("GET", path, what, query, endless=follow)
        try:
            with _translated(what):
                for line in response:  # as they come, also of a log that is followed
                    yield bytes(line).removesuffix(b"\n")
        finally:
            response.close()

    def execute(self, namespace: str, pod: str, container: str, command: Sequence[str]) -> Iterator[bytes]:
        """The standard output of a command in a container, as it comes; what was read is not kept.

        Raises:
            CommandFailed: its exit code is not 0.
            Interrupted: the connection ended before the command.
        """
        what = f"create pods/exec {namespace}/{pod}"
        query = [("container", container), ("stdout", "true"), ("stderr", "true")]
        query += [("command", word) for word in command]
        url = self._configuration.host.rstrip("/") + kind_of("Pod").path(namespace, pod, "exec")
        headers: dict[str, str] = {}
        with _translated(what):
            self._authorize(headers)
            try:
                socket = ws_client.create_websocket(  # type: ignore[no-untyped-call]
                    self._configuration,
                    ws_client.get_websocket_url(f"{url}?{urlencode(query)}"),  # type: ignore[no-untyped-call]
                    {name.lower(): value for name, value in headers.items()},
                )
            except WebSocketBadStatusException as error:
                body = errors.decode(error.resp_body or b"")
                raise errors.from_status(error.status_code, body, what=what, retry_after=None) from error
        said = b""
        try:
            socket.settimeout(IDLE_SECONDS)
            while True:
                try:
                    code, frame = socket.recv_data_frame(True)
                except (WebSocketException, OSError) as error:
                    raise Interrupted(f"{type(error).__name__}: {error}") from error
                if code == ABNF.OPCODE_CLOSE:
                    raise Interrupted("the connection was closed")
                if code not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) or not frame.data:
                    continue
                channel, data = frame.data[0], bytes(frame.data[1:])
                if channel == _STDOUT and data:
                    yield data
                elif channel == _STDERR:
                    said = (said + data)[-_MAX_STDERR:]
                elif channel == _RESULT and data:
                    result = errors.decode(data)
                    if result.get("status") == "Success":
                        return
                    text = said.decode(errors="replace").strip()
                    raise CommandFailed(text or str(result.get("message")))
        finally:
            socket.shutdown()


class CommandFailed(Exception):
    """A command in a container failed; the message is its error output."""


def open_session(
    arguments: argparse.Namespace,
    environ: Mapping[str, str] = os.environ,
    *,
    seconds: tuple[float, float] = SECONDS,
    retries: int | None = None,
) -> Session:
    """The session of a command, by ``--kubeconfig``, ``--context`` and ``-n``.

    Args:
        seconds, retries: of a request; without ``retries``, urllib3's.

    As in kubectl, KUBECONFIG may name several files, and in a pod without any kubeconfig its service account is used.

    Raises:
        ClusterProblem: there is no configuration, or it cannot be used.
    """
    named = arguments.kubeconfig or environ.get("KUBECONFIG") or None
    default = Path("~/.kube/config").expanduser()
    configuration = Configuration()
    configuration.retries = retries
    try:
        in_pod = named is None and not default.exists() and "KUBERNETES_SERVICE_HOST" in environ
        if in_pod and arguments.context is None:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            namespace = NAMESPACE_FILE.read_text().strip() if NAMESPACE_FILE.exists() else ""
        else:
            files = named or str(default)
            if not any(Path(file).expanduser().is_file() for file in files.split(os.pathsep) if file):
                raise ClusterProblem(f"no kubeconfig at {files}: set KUBECONFIG or --kubeconfig", BAD_INPUT)
            context = arguments.context or _current_context(files)
            config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=files,
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
            merged = KubeConfigMerger(files).config  # type: ignore[no-untyped-call]
            used = merged["contexts"].get_with_name(context)["context"]
            namespace = str(used.safe_get("namespace") or "")
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError) as error:
        raise ClusterProblem(f"the kubeconfig cannot be used: {error}", BAD_INPUT) from error
    return Session(configuration, arguments.namespace or namespace or "default", seconds)


def _current_context(files: str) -> str | None:
    """Of the first file that names one, as in kubectl; the library takes the last."""
    for file in files.split(os.pathsep):
        path = Path(file).expanduser()
        found = yaml.safe_load(path.read_text()) if file and path.is_file() else None
        if isinstance(found, dict) and found.get("current-context"):
            return str(found["current-context"])
    return None


def run_cluster_command(arguments: argparse.Namespace) -> int:
    """The exit code of ``get``, ``why``, ``logs``, ``fetch``, ``submit`` or ``fork``: each has a module of its name."""
    module = import_module(f"scalerl_cli.clusters.{arguments.command}")
    try:
        code: int = getattr(module, arguments.command)(open_session(arguments), arguments)
    except errors.ApiError as error:
        raise explained(error) from error
    return code


def explained(error: errors.ApiError | ClusterProblem) -> ClusterProblem:
    """The message of a refused request: what the user may not do and what to ask for, or what is missing."""
    if isinstance(error, ClusterProblem):
        return error
    if isinstance(error, errors.QuotaExceeded):
        return ClusterProblem(error.message, FORBIDDEN)
    if isinstance(error, errors.Forbidden):
        # Admission refuses with the same code, and says why itself; only RBAC names a user.
        if "User " not in error.message:
            return ClusterProblem(f"{error.what}: {error.message}", FORBIDDEN)
        verb, _, rest = error.what.partition(" ")
        resource = rest.split(" ")[0]
        verb = "patch" if verb == "apply" else verb
        text = (
            f"you may not {error.what}: ask for the verb {verb!r} of {resource!r} (docs/clusters.md, Rights)"
        )
        return ClusterProblem(f"{text}; the API server says: {error.message}", FORBIDDEN)
    if error.code == 401:
        text = "the API server does not accept your credentials: log in again, or choose another --context"
        return ClusterProblem(text, FORBIDDEN)
    if isinstance(error, errors.NotFound) and _resource(kind_of(RUN)) in error.what:
        return ClusterProblem(not_installed(), NOT_FOUND)
    if isinstance(error, errors.Invalid):
        return ClusterProblem(f"refused: {error.message}", BAD_INPUT)
    return ClusterProblem(f"{error}", NOT_FOUND if isinstance(error, errors.NotFound) else FAILED)


def not_installed() -> str:
    return f"ScaleRL is not installed in this cluster: it has no kind {RUN} ({API_VERSION}); see docs/kubernetes.md"


def _resource(kind: Kind) -> str:
    return f"{kind.plural}.{GROUP}" if kind.group == GROUP else f"{kind.plural}.{kind.group}".rstrip(".")


def _where(namespace: str | None, name: str | None) -> str:
    if name is not None:
        return "/".join(filter(None, (namespace, name)))
    return "in all namespaces" if namespace is None else f"in the namespace {namespace}"


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except (urllib3.exceptions.HTTPError, ApiException, WebSocketException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise errors.Unreachable(f"the API server cannot be reached: {reason}", what=what) from error
