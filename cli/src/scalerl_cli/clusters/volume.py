"""Files of a run's volume, read by commands in a container that mounts it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from scalerl_cli.clusters.runs import Run, plain
from scalerl_cli.clusters.session import CommandFailed, Interrupted, Session, Trouble
from scalerl_cli.exits import BAD_INPUT, NOT_FOUND
from scalerl_cli.output import replace_text, say
from scalerl_operator.build.pods import USER_ID
from scalerl_operator.kube import errors
from scalerl_operator.kube.types import Object
from scalerl_operator.names import RUN_DIR
from scalerl_operator.workloads import Role

TRIES: Final = 4
"""Connections for one file without a byte of progress between them."""
START_SECONDS: Final = 300.0
"""Longest start of the pod that reads the volume."""
READER_SECONDS: Final = 6 * 3600
"""After so long, that pod ends by itself, should this process not delete it."""
READER_LABEL: Final = "scalerl.dev/fetch"
_LISTING: Final = "listing.json"

# Only what busybox has too. The arguments follow the script, so that no name becomes code.
_LIST: Final = (
    'cd "$1" && shift && for p in "$@"; do '
    'if [ -e "$p" ]; then find "$p" -type f -exec stat -c "%s %Y %n" {} + || exit; fi; done'
)
_READ: Final = 'cd "$1" && [ -f "$2" ] && tail -c "+$3" "$2" | head -c "$4"'
_SUM: Final = 'cd "$1" && head -c "$3" "$2" | sha256sum'


@dataclass(frozen=True)
class Entry:
    """A file of the volume, as listed. It may grow: the first ``size`` bytes are copied."""

    path: str
    """Relative to the run directory."""
    size: int
    changed: int
    """Unix seconds of its last change."""


@dataclass(frozen=True)
class Volume:
    """The run directory in a container."""

    session: Session
    namespace: str
    pod: str
    container: str

    def list(self, paths: Sequence[str]) -> list[Entry]:
        """All files under ``paths``, those that exist.

        Raises:
            Trouble: the listing cannot be read, or has a path that leaves the run directory.
        """
        text = b"".join(self._run(_LIST, *paths)).decode(errors="surrogateescape")
        entries = []
        for line in text.splitlines():
            size, changed, path = line.split(" ", 2)
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise Trouble(f"the volume lists {plain(path)!r}, which is outside of the run directory")
            entries.append(Entry(path, int(size), int(changed)))
        return sorted(entries, key=lambda entry: entry.path)

    def read(self, entry: Entry, offset: int) -> Iterator[bytes]:
        """The bytes of a file from ``offset`` to its listed size."""
        return self._run(_READ, entry.path, str(offset + 1), str(entry.size - offset))

    def sha256(self, entry: Entry) -> str:
        """Of the file's first ``size`` bytes."""
        return b"".join(self._run(_SUM, entry.path, str(entry.size))).decode().partition(" ")[0]

    def _run(self, script: str, *arguments: str) -> Iterator[bytes]:
        command = ["sh", "-c", script, "sh", RUN_DIR, *arguments]
        return self.session.execute(self.namespace, self.pod, self.container, command)


def copy(
    volume: Volume, entries: Sequence[Entry], target: Path, *, strip: str = "", vanishing: bool = False
) -> None:
    """Copy files into the new directory ``target``, each verified by its SHA-256.

    Everything is written beside ``target`` first, and is kept there if the copy fails: the next one continues it.

    strip: prefix that local paths leave out.
    vanishing: files that disappear meanwhile are left out, as segments of a journal.

    Raises:
        Trouble: too little space, or a file changed or cannot be read.
    """
    staging = target.with_name(f".{target.name}.partial")
    try:
        _continue_with(staging, entries)
        left = sum(entry.size for entry in entries) - sum(
            file.stat().st_size for file in staging.rglob("*") if file.is_file()
        )
        if left > (free := shutil.disk_usage(staging).free):
            raise Trouble(
                f"{target.parent} has {free / 1e9:.1f} GB free; {left / 1e9:.1f} GB more are needed"
            )
        for number, entry in enumerate(entries, 1):
            part = staging / entry.path.removeprefix(strip)
            part.parent.mkdir(parents=True, exist_ok=True)
            if not _copy_one(volume, entry, part, vanishing=vanishing):
                say(f"{plain(entry.path)}: gone meanwhile, left out", error=True)
                continue
            say(f"{number} of {len(entries)}: {plain(entry.path)}, {entry.size:,} bytes", error=True)
        (staging / _LISTING).unlink()
        os.rename(staging, target)
    except OSError as error:
        raise Trouble(f"{error.filename or target}: {error.strerror or error}") from error


def _continue_with(staging: Path, entries: Sequence[Entry]) -> None:
    """Prepare the directory of an earlier copy: files that differ from those on the volume are deleted."""
    listing = {entry.path: [entry.size, entry.changed] for entry in entries}
    before: object = None
    with contextlib.suppress(OSError, ValueError):
        before = json.loads((staging / _LISTING).read_text())
    if before != listing and staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True, exist_ok=True)
    replace_text(staging / _LISTING, json.dumps(listing))


def _copy_one(volume: Volume, entry: Entry, part: Path, *, vanishing: bool) -> bool:
    """Copy the rest of a file, and verify all of it. False: it is gone, and ``vanishing``."""
    tries = TRIES
    while True:
        at = part.stat().st_size if part.exists() else 0
        try:
            with part.open("ab") as file:
                if at < entry.size:
                    for data in volume.read(entry, at):
                        file.write(data)
            if part.stat().st_size == entry.size and _is_verified(volume, entry, part):
                return True
        except (Interrupted, errors.Unreachable) as error:
            tries = TRIES if part.stat().st_size > at else tries - 1
            if tries > 0:
                time.sleep(1.0)
                continue
            raise Trouble(
                f"{plain(entry.path)}: the connection ended ({error}); {part.stat().st_size:,} of {entry.size:,} bytes "
                "are here: repeat the command to continue"
            ) from error
        except CommandFailed as error:
            if not vanishing:
                part.unlink()
                raise Trouble(
                    f"{plain(entry.path)}: it cannot be read: {plain(error)}; repeat the command"
                ) from error
        part.unlink()
        if not vanishing:
            raise Trouble(
                f"{plain(entry.path)}: it changed during the copy (size or SHA-256 differ): repeat the command"
            )
        return False


def _is_verified(volume: Volume, entry: Entry, part: Path) -> bool:
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == volume.sha256(entry)


@contextlib.contextmanager
def opened(session: Session, run: Run, image: str | None) -> Iterator[Volume]:
    """The run's volume: in its coordinator while that runs, else in a pod of its own, which is deleted afterwards.

    Raises:
        Trouble: the claim does not exist, or the pod does not start.
    """
    pod = f"{run.names.coordinator}-0"
    if run.record is None and _runs(session, run, pod):
        yield Volume(session, run.namespace, pod, str(Role.COORDINATOR))
        return
    image = image or (run.spec.get("images") or {}).get("coordinator")
    if image is None:
        raise Trouble(
            f"{run.name} has no running coordinator, and its spec names no image for a pod that reads the claim {run.claim}: "
            "give one with --image; any with sh, find, stat, tail and sha256sum will do, such as busybox",
            BAD_INPUT,
        )
    name = f"{run.names.stem}-fetch-{uuid.uuid4().hex[:6]}"
    try:
        session.create("Pod", run.namespace, reader_pod(run, name, image))
        say(f"started the pod {name}, which reads the claim {run.claim}", error=True)
        _wait(session, run, name)
        yield Volume(session, run.namespace, name, "fetch")
    finally:
        try:
            session.delete("Pod", run.namespace, name)
        except errors.ApiError as error:
            say(f"the pod {name} could not be deleted, and ends by itself: {error}", error=True)


def reader_pod(run: Run, name: str, image: str) -> Object:
    """A pod that mounts the run's directory read-only and does nothing. It has no label of the run, whose NetworkPolicy admits
    all pods with its labels."""
    template = run.spec.get("podTemplate") or {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": run.namespace, "labels": {READER_LABEL: "true"}},
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": READER_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "imagePullSecrets": list(template.get("imagePullSecrets") or ()),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "fetch",
                    "image": image,
                    "command": ["sleep", str(READER_SECONDS)],
                    "resources": {
                        "requests": {"cpu": "100m", "memory": "64Mi"},
                        "limits": {"cpu": "1", "memory": "256Mi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [
                        {"name": "run", "mountPath": RUN_DIR, "subPath": run.name, "readOnly": True}
                    ],
                }
            ],
            "volumes": [{"name": "run", "persistentVolumeClaim": {"claimName": run.claim}}],
        },
    }


def _runs(session: Session, run: Run, pod: str) -> bool:
    found = session.get("Pod", run.namespace, pod)
    if found is None or "deletionTimestamp" in found["metadata"]:
        return False
    states = (found.get("status") or {}).get("containerStatuses") or ()
    return any(one["name"] == Role.COORDINATOR and "running" in (one.get("state") or {}) for one in states)


def _wait(session: Session, run: Run, name: str) -> None:
    """Wait until the pod runs; the message of a time-out has what it waits for."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        found = session.get("Pod", run.namespace, name)
        if found is None:
            raise Trouble(f"the pod {name} was deleted by somebody", NOT_FOUND)
        status = found.get("status") or {}
        if status.get("phase") == "Running":
            return
        told = [str(c["message"]) for c in status.get("conditions") or () if c.get("message")]
        for one in status.get("containerStatuses") or ():
            waiting = (one.get("state") or {}).get("waiting") or {}
            told += [f"{waiting.get('reason', '')}: {waiting['message']}"] if waiting.get("message") else []
        if status.get("phase") in ("Failed", "Succeeded") or time.monotonic() > deadline:
            raise Trouble(f"the pod {name} does not run: {plain('; '.join(told) or status.get('phase'))}")
        time.sleep(0.5)
