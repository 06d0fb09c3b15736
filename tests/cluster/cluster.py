"""A real Kubernetes on this machine: ``cluster.py up``, ``status``, ``down``; ``--control-plane-only`` needs no root.

``tool NAME`` builds a program that tests need (helm, kubeconform, kubectl) and prints where it is.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from testcluster import cache, debian, kind, progress, start, tools
from testcluster.errors import ClusterError, MissingError
from testcluster.handle import Cluster
from testcluster.images import Images, build_all, has_packages

FIRST_MINUTES, FIRST_BYTES, GO_BYTES = 20, 17e9, 4e9
MISSING = 3
"""Exit code where this machine lacks what a cluster needs."""


def up(arguments: argparse.Namespace) -> None:
    began = time.monotonic()
    root = start.default_root(arguments.name)
    cluster = _found(arguments.name)
    if cluster is None:
        if root.exists():  # of a cluster that did not go down: the machine went, or it was killed
            start.end(start.Layout(root))
        if arguments.control_plane_only:
            cluster = start.start_control_plane(
                root, unreal_nodes=arguments.unreal_nodes, die_with_caller=False
            )
        elif kind.usable():
            cluster = kind.start_kind(arguments.name, root)
        else:
            if arguments.images:
                _enough_room()
                prepare(arguments)
            cluster = start.start_cluster(root, die_with_caller=False)
    if arguments.images:
        Images(cluster).load_as_released()
    print(f"up after {time.monotonic() - began:.1f} s; in your shell:", file=sys.stderr)
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    made = {"kubectl": tools.kubectl} | ({"helm": lambda: tools.tool("helm")} if arguments.images else {})
    missing = [str(program().parent) for name, program in made.items() if shutil.which(name) is None]
    if missing:
        print(f"export PATH=$PATH:{':'.join(missing)}")
    if arguments.images:
        print("its images are there for `helm install ... --set images.registry=localhost`", file=sys.stderr)


def _found(name: str) -> Cluster | None:
    """The cluster of that name which is up, by kind or by us."""
    return kind.found_kind(name, start.default_root(name)) or start.found(name)


def _enough_room() -> None:
    """The first time is long and large: said before, and refused where the disk is too small."""
    kept = cache.folder()
    if (kept / "containerd").exists():
        return
    kept.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(kept).free
    print(
        f"the first time: about {FIRST_MINUTES} minutes on two cores, {FIRST_BYTES / 1e9:.0f} GB in {kept},"
        f" {GO_BYTES / 1e9:.0f} GB in Go's own caches, and Debian's packages installed where they are missing; later it takes half a minute",
        file=sys.stderr,
    )
    if free < FIRST_BYTES:
        raise ClusterError(
            f"{kept} has {free / 1e9:.1f} GB left; set {cache.VARIABLE} to a folder on a larger disk"
        )


def down(arguments: argparse.Namespace) -> None:
    root = start.default_root(arguments.name)
    if (cluster := kind.found_kind(arguments.name, root)) is not None:
        cluster.down()
    elif root.exists():
        start.end(start.Layout(root))


def prepare(_: argparse.Namespace) -> None:
    """Programs are compiled while images are fetched: the two wait for different things."""

    def programs() -> None:
        for name in tools.PREPARED:
            tools.tool(name)

    def images() -> None:
        debian.installed(debian.NODE, debian.IMAGES, debian.PROMETHEUS)
        build_all()

    progress.together(programs, images)


def kept(_: argparse.Namespace) -> None:
    """Exit with 1 if programs have to be compiled or packages of images installed, minutes each; our own code takes a minute or two."""
    sys.exit(0 if all(map(tools.is_kept, tools.PREPARED)) and has_packages() else 1)


def status(arguments: argparse.Namespace) -> None:
    cluster = _found(arguments.name)
    if cluster is None:
        print("down")
        sys.exit(1)
    _show(cluster)


def _show(cluster: Cluster) -> None:
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    if cluster.layout is not None:
        print("programs:", ", ".join(cluster.programs()))
    print(cluster.kubectl("get", "nodes", "-o", "wide"), end="")


def tool(arguments: argparse.Namespace) -> None:
    print(tools.kubectl() if arguments.program == "kubectl" else tools.tool(arguments.program))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function, what in (
        (up, "start it, print the KUBECONFIG line"),
        (down, "end it, with everything it made"),
        (status, "whether it is up"),
    ):
        command = commands.add_parser(function.__name__, help=what)
        command.set_defaults(function=function)
        command.add_argument("--name", default="default", help="to have several (with a node: one at a time)")
        if function is up:
            command.add_argument(
                "--control-plane-only", action="store_true", help="no node, no root, seconds"
            )
            command.add_argument(
                "--unreal-nodes",
                type=int,
                default=0,
                metavar="N",
                help="N nodes without machines (control plane only)",
            )
            command.add_argument(
                "--images", action="store_true", help="build the project's images and load them"
            )
    command = commands.add_parser(
        "prepare", help="build all that is kept, so that `up --images` takes seconds"
    )
    command.set_defaults(function=prepare)
    command = commands.add_parser("kept", help="exit with 0 if only our own code has to be built")
    command.set_defaults(function=kept)
    command = commands.add_parser("tool", help="build a program and print its path")
    command.set_defaults(function=tool)
    command.add_argument("program", choices=[*tools.NAMES, "kubectl"])
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what is being built, too
    try:
        arguments.function(arguments)
    except (ClusterError, subprocess.TimeoutExpired) as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        print(f"{error}{notes}", file=sys.stderr)
        sys.exit(MISSING if isinstance(error, MissingError) else 1)


if __name__ == "__main__":
    main()
