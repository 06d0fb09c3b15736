"""Files of a run's volume, read by commands in a container that mounts it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from scalerl_cli.clusters.runs import Run, plain
from scalerl_cli.clusters.session import ClusterProblem, CommandFailed, Interrupted, Session
from scalerl_cli.exits import BAD_INPUT, NOT_FOUND
from scalerl_cli.output import echo
from scalerl_lifecycle.workloads import Role
from scalerl_operator.kube import errors
from scalerl_operator.kube.types import Object
from scalerl_operator.manifests.pods import container_security, pod_security
from scalerl_operator.names import RUN_DIR

TRIES: Final = 4
"""Connections for one file without a byte of progress between them."""
START_SECONDS: Final = 300.0
"""Longest start of the pod that reads the volume."""
READER_SECONDS: Final = 6 * 3600
"""After so long, that pod ends by itself, should this process not delete it."""
READER_LABEL: Final = "scalerl.dev/fetch"
RANGE: Final = 64 << 20
"""Bytes of a file that are hashed at a time: the hash of a whole large file would be silent for too long."""
_LINE: Final = re.compile(r"(\d+) (.+)", re.DOTALL)

# Only what busybox has too. Files in folders owner-* are renamed at each commit of the journal. The arguments follow the script, so that no name becomes code.
_LIST: Final = (
    'cd "$1" && shift && for p in "$@"; do '
    'if [ -e "$p" ]; then find "$p" -type f ! -path "*/owner-*" -exec stat -c "%s %n" {} + || exit; fi; done'
)
_READ: Final = 'cd "$1" && [ -f "$2" ] && exec <"$2" && tail -c "+$3" | head -c "$4"'
_SUM: Final = (
    'cd "$1" && [ -f "$2" ] && exec <"$2" && left="$3" && while [ "$left" -gt 0 ]; do '
    f'dd bs=1048576 count={RANGE >> 20} 2>/dev/null | head -c "$left" | sha256sum || exit; left=$((left - {RANGE})); done'
)


@dataclass(frozen=True)
class Entry:
    """A file of the volume, as listed. It may grow: the first ``size`` bytes are copied."""

    path: str
    """Relative to the run directory, normalised."""
    size: int


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
            ClusterProblem: the listing cannot be read, or has a path that leaves the run directory.
        """
        *lines, rest = b"".join(self._run(_LIST, *paths)).split(b"\n")
        if rest:
            raise ClusterProblem("the listing of the volume ends within a line: repeat the command")
        entries = []
        for line in (raw.decode(errors="surrogateescape") for raw in lines):
            parsed = _LINE.fullmatch(line)
            if parsed is None:
                raise ClusterProblem(
                    f"the listing of the volume has the line {line!a}, which is no file: a name with a line break?"
                )
            size, path = parsed.groups()
            if not path.isprintable():
                raise ClusterProblem(f"the file {path!a} of the volume cannot be copied: rename it")
            below = any(path == one or path.startswith(f"{one}/") for one in paths)
            if not below or not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise ClusterProblem(f"the volume lists {path!r}, which is outside of what was asked for")
            entries.append(Entry(path, int(size)))
        return sorted(entries, key=lambda entry: entry.path)

    def read(self, entry: Entry, offset: int) -> Iterator[bytes]:
        """The bytes of a file from ``offset`` to its listed size."""
        return self._run(_READ, entry.path, str(offset + 1), str(entry.size - offset))

    def sha256(self, entry: Entry) -> Sequence[str]:
        """Of each :data:`RANGE` of the file's first ``size`` bytes."""
        lines = b"".join(self._run(_SUM, entry.path, str(entry.size))).decode().splitlines()
        return [line.partition(" ")[0] for line in lines]

    def _run(self, script: str, *arguments: str) -> Iterator[bytes]:
        command = ["sh", "-c", script, "sh", RUN_DIR, *arguments]
        return self.session.execute(self.namespace, self.pod, self.container, command)


def copy(
    volume: Volume, entries: Sequence[Entry], target: Path, *, strip: str = "", vanishing: bool = False
) -> None:
    """Copy files into the new directory ``target``, each verified by its SHA-256.

    Everything is written beside ``target`` first, and is kept there if the copy fails: the next one continues each file, which
    may have grown.

    Args:
        strip: prefix that local paths leave out.
        vanishing: files that no longer exist are left out, as segments of a journal.

    Raises:
        ClusterProblem: too little space, or a file changed or cannot be read.
    """
    staging = target.with_name(f".{target.name}.partial")
    try:
        _continue_with(staging, {entry.path.removeprefix(strip): entry.size for entry in entries})
        left = sum(entry.size for entry in entries) - sum(
            file.stat().st_size for file in staging.rglob("*") if file.is_file()
        )
        if left > (free := shutil.disk_usage(staging).free):
            raise ClusterProblem(
                f"{target.parent} has {free / 1e9:.1f} GB free; {left / 1e9:.1f} GB more are needed"
            )
        for number, entry in enumerate(entries, 1):
            part = staging / entry.path.removeprefix(strip)
            part.parent.mkdir(parents=True, exist_ok=True)
            if not _copy_one(volume, entry, part, vanishing=vanishing):
                echo(f"{plain(entry.path)}: gone meanwhile, left out", error=True)
                continue
            echo(f"{number} of {len(entries)}: {plain(entry.path)}, {entry.size:,} bytes", error=True)
        os.rename(staging, target)
    except OSError as error:
        raise ClusterProblem(f"{error.filename or target}: {error.strerror or error}") from error


def _continue_with(staging: Path, sizes: Mapping[str, int]) -> None:
    """Prepare the directory of an earlier copy: what is no part of a file of this one is deleted. sizes: by local path."""
    if staging.is_symlink():
        staging.unlink()
    staging.mkdir(parents=True, exist_ok=True)
    for found in list(staging.rglob("*")):
        if found.is_symlink() or (
            found.is_file() and found.stat().st_size > sizes.get(str(found.relative_to(staging)), -1)
        ):
            found.unlink()


def _open(part: Path, flags: int) -> BinaryIO:
    """Open a file for reading and writing; a symbolic link is not followed."""
    return os.fdopen(os.open(part, os.O_RDWR | os.O_NOFOLLOW | flags, 0o666), "r+b")


def _copy_one(volume: Volume, entry: Entry, part: Path, *, vanishing: bool) -> bool:
    """Copy the rest of a file, and verify all of it. False: it is gone, and ``vanishing``."""
    tries = TRIES
    with _open(part, os.O_CREAT) as file:
        continued = file.seek(0, os.SEEK_END) > 0
        while True:
            at = file.seek(0, os.SEEK_END)
            try:
                if at < entry.size:
                    for data in volume.read(entry, at):
                        file.write(data)
                if file.tell() == entry.size and volume.sha256(entry) == _sums(file):
                    return True
                problem = "it changed during the copy (size or SHA-256 differ)"
                if continued:
                    continued = False
                    file.truncate(0)
                    continue
                break
            except (Interrupted, errors.Unreachable) as error:
                here = file.seek(0, os.SEEK_END)
                tries = TRIES if here > at else tries - 1
                if tries > 0:
                    time.sleep(1.0)
                    continue
                raise ClusterProblem(
                    f"{plain(entry.path)}: the connection ended ({error}); {here:,} of {entry.size:,} bytes are here: "
                    "repeat the command to continue"
                ) from error
            except CommandFailed as error:
                problem = f"it cannot be read: {plain(error)}"
                break
    part.unlink()
    if vanishing and _is_gone(volume, entry):
        return False
    raise ClusterProblem(f"{plain(entry.path)}: {problem}; repeat the command")


def _is_gone(volume: Volume, entry: Entry) -> bool:
    """Whether a file no longer exists. Where that is not known, it does."""
    try:
        return not volume.list([entry.path])
    except (CommandFailed, Interrupted, errors.Unreachable):
        return False


def _sums(file: BinaryIO) -> list[str]:
    """As :meth:`Volume.sha256`."""
    file.seek(0)
    return [hashlib.sha256(data).hexdigest() for data in iter(lambda: file.read(RANGE), b"")]


@contextlib.contextmanager
def opened(session: Session, run: Run, image: str | None) -> Iterator[Volume]:
    """The run's volume: in its coordinator while that runs, else in a pod of its own, which is deleted afterwards.

    Raises:
        ClusterProblem: the claim does not exist, or the pod does not start.
    """
    pod = f"{run.names.coordinator}-0"
    if run.record is None and _runs(session, run, pod):
        yield Volume(session, run.namespace, pod, str(Role.COORDINATOR))
        return
    image = image or (run.spec.get("images") or {}).get("coordinator")
    if image is None:
        raise ClusterProblem(
            f"{run.name} has no running coordinator, and its spec names no image for a pod that reads the claim {run.claim}: "
            "give one with --image; any with sh, find, stat, dd, head, tail and sha256sum will do, such as busybox",
            BAD_INPUT,
        )
    name = f"{run.names.stem}-fetch-{uuid.uuid4().hex[:6]}"
    session.create("Pod", run.namespace, reader_pod(run, name, image))
    try:
        echo(f"started the pod {name}, which reads the claim {run.claim}", error=True)
        _wait(session, run, name)
        yield Volume(session, run.namespace, name, "fetch")
    finally:
        try:
            session.delete("Pod", run.namespace, name)
        except errors.ApiError as error:
            echo(f"the pod {name} could not be deleted, and ends by itself: {error}", error=True)


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
            "nodeSelector": dict(template.get("nodeSelector") or {}),
            "tolerations": list(template.get("tolerations") or ()),
            "securityContext": pod_security(),
            "containers": [
                {
                    "name": "fetch",
                    "image": image,
                    "command": ["sleep", str(READER_SECONDS)],
                    "resources": {
                        "requests": {"cpu": "100m", "memory": "64Mi"},
                        "limits": {"cpu": "1", "memory": "256Mi"},
                    },
                    "securityContext": container_security(),
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
            raise ClusterProblem(f"the pod {name} was deleted by somebody", NOT_FOUND)
        status = found.get("status") or {}
        if status.get("phase") == "Running":
            return
        why = [str(c["message"]) for c in status.get("conditions") or () if c.get("message")]
        for one in status.get("containerStatuses") or ():
            waiting = (one.get("state") or {}).get("waiting") or {}
            if waiting.get("message"):
                why.append(f"{waiting.get('reason', '')}: {waiting['message']}")
        if status.get("phase") in ("Failed", "Succeeded") or time.monotonic() > deadline:
            reason = plain("; ".join(why) or status.get("phase"))
            raise ClusterProblem(f"the pod {name} does not run: {reason}")
        time.sleep(0.5)
