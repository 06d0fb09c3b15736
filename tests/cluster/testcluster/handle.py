"""A cluster that runs, as tests use it: the same for each kind of cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testcluster.layout import Layout

_ANSWER_SECONDS = 120.0
_SERVED_SECONDS = 120.0
_NOT_SERVED = (
    "no matches for kind",
    "could not find the requested resource",
    "doesn't have a resource type",
    "couldn't find resource for",
    "not found in OpenAPI schema",
)
_NOT_CONNECTED = "net/http: TLS handshake timeout"


class KubectlError(RuntimeError):
    """kubectl said no."""


@dataclass(frozen=True)
class Cluster:
    """A Kubernetes that answers.

    ``layout`` is None for a cluster that is not ours: its programs cannot be stopped, and images are not loaded
    into it.
    """

    kubeconfig: Path
    kubectl_program: Path
    layout: Layout | None = None
    loader: Callable[[Path], None] | None = None
    ender: Callable[[], None] | None = None
    pods_run: bool = True
    """False for a control plane alone: pods are made and never start."""
    _gone: list[bool] = field(default_factory=list, repr=False)

    @property
    def env(self) -> dict[str, str]:
        """The environment for a program that talks to this cluster."""
        # A kubectl that hardly collects garbage takes a fifth less of a processor.
        return {**os.environ, "GOGC": "400", "KUBECONFIG": str(self.kubeconfig)}

    def kubectl(self, *words: str | Path, stdin: str | None = None, seconds: float = 600.0) -> str:
        """What kubectl printed; it is called again while it gives up before it has a connection, after ten seconds whatever its options.

        Raises KubectlError with what it said instead."""
        argv = [str(self.kubectl_program), f"--kubeconfig={self.kubeconfig}", *map(str, words)]
        end = time.monotonic() + seconds
        while True:
            try:
                done = subprocess.run(
                    argv,
                    input=stdin,
                    capture_output=True,
                    text=True,
                    timeout=max(0.0, end - time.monotonic()),
                    env=self.env,
                )
            except subprocess.TimeoutExpired as error:
                raise KubectlError(
                    f"`kubectl {' '.join(argv[2:])}` took more than {seconds:.0f} s"
                ) from error
            if done.returncode == 0:
                return done.stdout
            if _NOT_CONNECTED not in done.stderr:
                raise KubectlError(
                    f"`kubectl {' '.join(argv[2:])}`: {done.stderr.strip() or done.stdout.strip()}"
                )

    def once_served(self, *words: str | Path, stdin: str | None = None) -> str:
        """:meth:`kubectl`, repeated while the kind that it asks for is not served.

        A definition that is new, or comes back, is served a moment after it is there.
        """
        end = time.monotonic() + _SERVED_SECONDS
        while True:
            try:
                return self.kubectl(*words, stdin=stdin)
            except KubectlError as error:
                if time.monotonic() > end or not any(text in str(error) for text in _NOT_SERVED):
                    raise
            time.sleep(0.5)

    def get(self, *words: str, seconds: float = 600.0) -> dict[str, Any]:
        """``kubectl get WORDS -o json``, read."""
        return json.loads(self.kubectl("get", *words, "-o", "json", seconds=seconds))

    def apply(self, *objects: dict[str, Any], namespace: str | None = None) -> None:
        """``kubectl apply`` of objects, once their kinds are served."""
        manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        where = () if namespace is None else ("-n", namespace)
        self.once_served("apply", *where, "-f", "-", stdin=manifest)

    def load_image(self, archive: Path) -> None:
        """Give the nodes the images of an archive (docker or OCI), under the names inside it."""
        if self.loader is None:
            raise RuntimeError(
                f"images cannot be loaded into the cluster of {self.kubeconfig}; push them to a registry it pulls from"
            )
        self.loader(archive)

    # Faults.

    def kill(self, program: str) -> None:
        """End one of the cluster's programs without asking: ``kube-apiserver``, ``kubelet``, ``coredns``, ..."""
        self._request_stop(do="kill", name=program)

    def start(self, program: str) -> None:
        """Start again what was killed."""
        self._request_stop(do="start", name=program)

    @contextlib.contextmanager
    def without(self, program: str) -> Iterator[None]:
        """The cluster lacks a program for a while."""
        self.kill(program)
        try:
            yield
        finally:
            self.start(program)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the programs of a control plane: SIGSTOP, and it takes no processor until SIGCONT."""
        for pid in self.programs().values():
            os.kill(pid, number)

    def programs(self) -> dict[str, int]:
        """The programs that run, and their process ids (in a node: those of its namespace)."""
        return dict(self._request_stop(do="programs")["running"])

    def down(self) -> None:
        """End it and everything it made; nothing happens for a cluster that is not ours, or is down."""
        if self.ender is not None and not self._gone:
            self.ender()
            self._gone.append(True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def _request_stop(self, **word: str) -> dict[str, Any]:
        if self.layout is None:
            raise RuntimeError(f"the cluster of {self.kubeconfig} is not ours to stop")
        return tell(self.layout, word)


def tell(layout: Layout, word: dict[str, str]) -> dict[str, Any]:
    """A word to a cluster's supervisor, and its answer. OSError where there is none; RuntimeError where it refused."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        connection.connect(str(layout.control))
        connection.sendall(json.dumps(word).encode() + b"\n")
        with connection.makefile("rb") as answers:
            answer: dict[str, Any] = json.loads(answers.readline() or b"{}")
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def until(seconds: float, *, every: float = 0.1) -> Iterator[None]:
    """For loops that wait: one round each ``every`` seconds, for at most ``seconds``, and at least one."""
    end = time.monotonic() + seconds
    while True:
        yield
        if time.monotonic() > end:
            return
        time.sleep(every)
