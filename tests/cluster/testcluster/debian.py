"""Programs that come from the machine's own package manager, installed when missing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from testcluster import cache
from testcluster.errors import MissingError

# program → package. What runs pods, and what makes images for them.
NODE = {
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "iptables": "iptables",
    "ip": "iproute2",
    "/bin/busybox": "busybox-static",
}
IMAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
PROMETHEUS = {"prometheus": "prometheus", "promtool": "prometheus"}
_POLICY = Path("/usr/sbin/policy-rc.d")
_SECONDS = 600


def installed(*needs: dict[str, str]) -> None:
    """See to it that every program is there. Raises MissingError, with the command to run, where that cannot be."""
    wanted = {program: package for need in needs for program, package in need.items()}
    missing = [program for program in wanted if not _there(program)]
    if not missing:
        return
    packages = sorted({wanted[program] for program in missing})
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    said = f"missing: {', '.join(missing)}; install with `{' '.join(command)}`"
    if os.geteuid() != 0:
        raise MissingError(f"{said} (needs root)")
    if shutil.which("apt-get") is None:
        raise MissingError(f"{said}, or what your distribution calls these packages")
    print(f"installing {', '.join(packages)}", file=sys.stderr, flush=True)
    with cache.lock(cache.folder() / ".debian"), _no_services():  # apt itself does not wait for another
        # The lists may be missing or old; they are read again only when the installation fails without that.
        if _apt(command).returncode != 0:
            _apt(["apt-get", "update"])
            done = _apt(command)
            if done.returncode != 0:
                raise MissingError(f"`{' '.join(command)}` exited {done.returncode}:\n{done.stdout[-2000:]}")
    still = [program for program in missing if not _there(program)]
    if still:
        raise MissingError(f"{', '.join(packages)} are installed, and {', '.join(still)} is not there")


def program(name: str) -> str:
    """The path of an installed program; sbin too, which a user's PATH may lack."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin")
    if found is None:
        raise MissingError(f"no program {name}")
    return found


def _there(name: str) -> bool:
    try:
        program(name)
    except MissingError:
        return False
    return True


def _apt(command: Iterable[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(command),
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
    )


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """A package's own service stays off while it is installed; the cluster starts what it needs itself."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
