"""Start and end clusters on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from testcluster import cache, cgroups, controlplane, debian, node, runtime, tools
from testcluster.controlplane import Ports
from testcluster.errors import ClusterError, MissingError
from testcluster.handle import Cluster, tell, until
from testcluster.layout import NODE_API_PORT, Layout
from testcluster.processes import die_with_parent
from testcluster.steps import Plan, Step

PACKAGE = Path(__file__).resolve().parent
_UP_SECONDS = 900.0
_DOWN_SECONDS = 150.0
_LEFTOVER_SECONDS = 60.0
_PIDFILE = "pid"
_PREFIX = "scalerl-test-cluster-"
_OWN = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]


def default_root(name: str) -> Path:
    """Where the cluster ``name`` that a person started is found again."""
    return Path(tempfile.gettempdir()) / f"scalerl-test-cluster-{os.geteuid()}" / name


def start_control_plane(
    root: Path | None = None, *, unreal_nodes: int = 0, die_with_caller: bool = True
) -> Cluster:
    """etcd, API server and controller-manager on free ports of loopback; no root needed, several at once.

    Args:
        root: where its files go; a new folder by default. Removed when it ends.
        unreal_nodes: nodes without machines, and a scheduler: their pods are Running at once and run nothing.
        die_with_caller: it ends when the calling process does, however that ends.

    Raises:
        ClusterError: it did not come up; says which part and its last lines.
        MissingError: there is no Go to build its programs with.
    """
    kube = tools.tool("kube")
    layout = _new(root)
    with contextlib.ExitStack() as held:
        holders = [held.enter_context(_reserved()) for _ in range(3)]
        ports = Ports(*(holder.getsockname()[1] for holder in holders))
        server = f"https://127.0.0.1:{ports.api}"
        _write_identities(kube, layout, server)
        steps: list[Step] = [
            *controlplane.store_and_api(kube, layout, ports, node=False),
            *controlplane.controllers(kube, layout),
        ]
        if unreal_nodes:
            steps += controlplane.scheduler(kube, layout)
            steps += controlplane.unreal_nodes(kube, layout, unreal_nodes)
        plan = Plan(tuple(steps), ca=str(layout.pki / "ca.crt"))
        # The supervisor holds the ports as long as it lives: a program that is killed finds its own when it starts again.
        _bring_up(layout, plan, [], die_with_caller, None, *(holder.fileno() for holder in holders))
    return Cluster(layout.kubeconfig, tools.kubectl(), layout, ender=lambda: end(layout), pods_run=False)


def start_cluster(root: Path | None = None, *, die_with_caller: bool = True) -> Cluster:
    """A whole cluster with one node that runs pods. Root only, and one at a time: it keeps images between starts.

    Its network, mounts and processes are in namespaces of their own; outside there is one port on loopback, the
    files below ``root``, and a control group.

    Raises:
        ClusterError: another one runs, or it did not come up.
        MissingError: not root, or what it needs could not be installed.
    """
    if os.geteuid() != 0:
        raise MissingError("a node needs root: run as root, or set KUBECONFIG to use a cluster that is there")
    debian.installed(debian.NODE)
    kube, coredns = tools.tool("kube"), tools.tool("coredns")
    images = runtime.store()
    if any(images.is_relative_to(folder) for folder in node.OWN_FOLDERS):
        raise ClusterError(
            f"{images} is below {', '.join(node.OWN_FOLDERS)}; set {cache.VARIABLE} to another folder"
        )
    with _only_one(images) as lock, socket.create_server(("127.0.0.1", 0)) as relay:
        layout = _new(root)
        _write_identities(kube, layout, node.api_server())
        server = f"https://127.0.0.1:{relay.getsockname()[1]}"
        controlplane.write_kubeconfig(layout.kubeconfig, layout, "admin", server)
        cgroups.create(layout.cgroup)
        plan = _whole(kube, coredns, layout, images)
        _bring_up(layout, plan, _OWN, die_with_caller, relay, lock.fileno())
    cluster = Cluster(
        layout.kubeconfig, tools.kubectl(), layout, loader=runtime.Loader(layout), ender=lambda: end(layout)
    )
    runtime.load_basic_images(cluster)
    return cluster


def _whole(kube: Path, coredns: Path, layout: Layout, images: Path) -> Plan:
    """A control plane and its node."""
    ports = Ports(NODE_API_PORT, 2379, 2380)
    return Plan(
        steps=(
            *node.network(),
            *node.runtime(kube, layout, images),
            *controlplane.store_and_api(kube, layout, ports, node=True),
            *controlplane.controllers(kube, layout),
            *controlplane.scheduler(kube, layout),
            *node.agents(kube, coredns, layout),
        ),
        ca=str(layout.pki / "ca.crt"),
        relay=("127.0.0.1", NODE_API_PORT),
        own_folders=node.OWN_FOLDERS,
        own_settings=node.OWN_SETTINGS,
        last=node.last(kube, layout),
        asked=("containerd",),
    )


def found(name: str) -> Cluster | None:
    """The cluster that a person started under ``name``, if it answers."""
    layout = Layout(default_root(name))
    try:
        tell(layout, {"do": "programs"})
    except OSError:
        return None
    return Cluster(
        layout.kubeconfig,
        tools.kubectl(),
        layout,
        loader=runtime.Loader(layout) if layout.has_node else None,
        ender=lambda: end(layout),
        pods_run=layout.has_node,
    )


def end(layout: Layout) -> None:
    """End a cluster: its programs, then its files. Nothing is left, also where its supervisor does not answer."""
    pidfile = layout.root / _PIDFILE
    if pidfile.exists():
        pid = int(pidfile.read_text())
        try:
            tell(layout, {"do": "down"})
            asked = True
        except (OSError, ValueError):
            asked = False
        if not _gone(pid, layout, _DOWN_SECONDS if asked else 0.01):
            os.kill(pid, signal.SIGKILL)  # takes its namespaces, or its programs, with it
            if not _gone(pid, layout, _LEFTOVER_SECONDS):
                raise ClusterError(f"process {pid} of the cluster in {layout.root} does not end")
    if f" {layout.root}/" in Path("/proc/self/mountinfo").read_text():
        raise ClusterError(
            f"something is still mounted below {layout.root}; unmount it, then remove that folder"
        )
    if layout.has_node:
        cgroups.remove(layout.cgroup)
    for _ in until(_LEFTOVER_SECONDS):  # programs that were asked to end may still write
        shutil.rmtree(layout.root, ignore_errors=True)
        if not layout.root.exists():
            return
    raise ClusterError(f"{layout.root} cannot be removed")


def _gone(pid: int, layout: Layout, seconds: float) -> bool:
    for _ in until(seconds, every=0.05):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # ours, if this process started it
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return True
        # Another's command line: it ended, and its number was given again. None at all: it is just starting.
        if state in "ZX" or (command and str(layout.root).encode() not in command):
            return True
    return False


def _new(root: Path | None) -> Layout:
    if root is None:
        _sweep()
        root = Path(tempfile.mkdtemp(prefix=_PREFIX))
    elif root.exists():
        raise ClusterError(f"{root} exists: a cluster is up there, or did not go down; run `cluster.py down`")
    layout = Layout(root.resolve())
    if len(str(layout.control)) > 100:
        if root.exists():
            root.rmdir()
        raise ClusterError(f"{layout.root} is too long for sockets in it")
    for folder in (layout.root, layout.logs, layout.volumes, layout.root / "config"):
        folder.mkdir(parents=True, exist_ok=True)
    layout.root.chmod(0o711)  # volumes are below, and their users are not root
    return layout


def _sweep() -> None:
    """Remove what clusters left whose callers were killed: their programs ended with them, their files did not."""
    for pidfile in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_PIDFILE}"):
        layout = Layout(pidfile.parent)
        with contextlib.suppress(OSError, ValueError):  # another user's, or it just ended
            if _gone(int(pidfile.read_text()), layout, 0.01):
                end(layout)


def _write_identities(kube: Path, layout: Layout, server: str) -> None:
    names = controlplane.certificate_names()
    subprocess.run([kube, "pki", layout.pki, *names], check=True, timeout=200)
    for part in (
        "admin",
        "coredns",
        "kube-controller-manager",
        "kube-proxy",
        "kube-scheduler",
        "kubelet",
        "volumes",
    ):
        controlplane.write_kubeconfig(layout.kubeconfig_of(part), layout, part, server)
    controlplane.write_kubeconfig(layout.kubeconfig, layout, "admin", server)


@contextlib.contextmanager
def _reserved() -> Iterator[socket.socket]:
    """Holds a free port, for a program that shares it: no other process gets the port as long as this socket is open."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder


def _only_one(images: Path) -> IO[str]:
    """The image store is one cluster's at a time; the lock is the supervisor's too, and ends with it."""
    try:
        return cache.lock(images.parent / ".in-use", wait=False)
    except BlockingIOError:
        raise ClusterError(
            "another cluster with a node is up: use it through its KUBECONFIG, or end it (`make cluster-down`)"
        ) from None


def _bring_up(
    layout: Layout,
    plan: Plan,
    own: list[str],
    die_with_caller: bool,
    relay: socket.socket | None = None,
    *held: int,
) -> None:
    """Start the supervisor and wait until it says ready; else end it and raise ClusterError."""
    layout.plan.write_text(json.dumps(plan.as_json()))
    handed = [] if relay is None else [relay.fileno()]
    command = [sys.executable, "-m", "testcluster.supervisor", str(layout.root), *map(str, handed)]
    if own:
        command = [debian.program("unshare"), *own, "--", *command]
    with (layout.logs / "supervisor.log").open("wb") as log:
        supervisor = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=layout.root,
            env={
                **os.environ,
                "GOGC": "200",  # the API server takes a third less of a processor, and 100 MB more
                "PYTHONPATH": str(PACKAGE.parent),
                "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            },
            pass_fds=[*handed, *held],
            start_new_session=True,
            preexec_fn=die_with_parent if die_with_caller else None,
        )
    supervisor.returncode = 0  # `end` waits for it, in this process or another
    (layout.root / _PIDFILE).write_text(str(supervisor.pid))
    try:
        _wait_ready(layout, supervisor.pid)
    except BaseException as error:
        kept = Path(tempfile.mkdtemp(prefix="scalerl-test-cluster-logs-"))
        with contextlib.suppress(OSError):
            shutil.copytree(layout.logs, kept, dirs_exist_ok=True)
        error.add_note(f"its logs are in {kept}")
        end(layout)
        raise


def _wait_ready(layout: Layout, pid: int) -> None:
    for _ in until(_UP_SECONDS):
        status = json.loads(layout.status.read_text()) if layout.status.exists() else {"phase": "starting"}
        if status["phase"] == "ready":
            return
        if status["phase"] == "failed":
            raise ClusterError(f"the cluster did not come up: {status['error']}")
        if _gone(pid, layout, 0.01):
            said = (layout.logs / "supervisor.log").read_text(errors="replace")[-2000:]
            raise ClusterError(f"the cluster's supervisor ended: {said}")
    raise ClusterError(f"the cluster is not up after {_UP_SECONDS:.0f} s")
