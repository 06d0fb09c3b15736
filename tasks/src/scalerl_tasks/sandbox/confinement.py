"""The layers around the process of a program: what the kernel offers, and how a process enters them."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import socket
from dataclasses import dataclass

from scalerl_tasks.sandbox import kernel

MAX_FILES_BYTES = 16 << 20
"""Of all files in a program's folder."""
MAX_FILES = 256
MAX_DESCRIPTORS = 64
_CHANNEL = 3
"""Descriptor of the program's socket."""

_READ = kernel.READ_FILE | kernel.READ_DIR
_OWN = _READ | kernel.WRITE_FILE | kernel.REMOVE_FILE | kernel.MAKE_REG | kernel.TRUNCATE
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_MOUNT_POINTS = ("/media", "/mnt", "/srv")
_TIME_ZONES = ("/usr/share/zoneinfo", "/etc/localtime")

_ALLOWED = """
read write close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn pread64 pwrite64
readv writev access pipe select sched_yield mremap msync madvise dup dup2 pause nanosleep getitimer alarm setitimer getpid
shutdown exit wait4 uname ftruncate getcwd rename renameat unlink readlink umask gettimeofday getrlimit getrusage sysinfo times
getuid getgid geteuid getegid getppid getpgrp getgroups getresuid getresgid getpgid getsid rt_sigpending rt_sigtimedwait
rt_sigsuspend sigaltstack sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min setrlimit gettid time
futex sched_getaffinity getdents64 set_tid_address restart_syscall clock_gettime clock_getres clock_nanosleep exit_group
epoll_wait epoll_ctl newfstatat unlinkat readlinkat faccessat pselect6 ppoll set_robust_list epoll_pwait eventfd2 epoll_create1
dup3 getcpu getrandom statx rseq faccessat2
"""
_CLONE_THREAD = 0x00010000 | 0x00000400  # and the same descriptors, whose number is limited
_CLONE_NEW = 0x7E020080
_O_TMPFILE = os.O_TMPFILE & ~os.O_DIRECTORY
# DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC: no owner, no signal, no notice, no lock.
_FCNTL = (0, 1, 2, 3, 4, 1030)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
_PRCTL = (15, 16)  # the thread's name


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program."""

    cpu_seconds: int = 4
    """CPU time of one test: of a program's run, or of a call."""
    memory_bytes: int = 512 << 20
    """Address space in addition to the launcher's."""
    output_bytes: int = 1 << 20
    """Of its output, or of one value."""
    threads: int = 16
    """Of the program, which is one process."""


def missing_from_kernel() -> list[str]:
    """What a sandbox needs and this system does not have; empty if it can be used."""
    missing = []
    if not kernel.syscall_numbers():
        missing.append(f"an architecture of x86_64 and aarch64 (this is {os.uname().machine})")
    if kernel.landlock_version() < 1:
        missing.append(
            "Landlock (Linux 5.13 or newer with landlock in the list of security modules, and a seccomp profile of the container that "
            "allows landlock_create_ruleset)"
        )
    try:
        with open("/proc/sys/kernel/seccomp/actions_avail") as file:
            if "errno" not in file.read():
                missing.append("seccomp filters")
    except OSError:
        missing.append("seccomp filters (CONFIG_SECCOMP_FILTER)")
    return missing


class Confinement:
    """The layers, prepared once in the launcher.

    Args:
        temporary: where the programs' folder is made without namespaces.
        runtime: folders of the standard library and of installed modules.
        limits: of each program.
        namespaces: whether to use namespaces, if the kernel allows them.

    Attributes:
        folder: the programs' own folder.
        namespaces: whether the launcher has moved to namespaces of its own.
    """

    def __init__(self, temporary: str, runtime: list[str], limits: Limits, *, namespaces: bool) -> None:
        kernel.no_new_privileges()
        self.folder = _mount_folder(runtime) if namespaces else ""
        self.namespaces = bool(self.folder)
        if not self.folder:
            self.folder = os.path.join(os.path.realpath(temporary), f"scalerl-program-{os.urandom(8).hex()}")
            os.mkdir(self.folder, 0o700)
        kernel.drop_capabilities()
        rules = [(path, _READ) for path in (*runtime, *_LIBRARIES, *_TIME_ZONES)]
        rules += [(f"/dev/{name}", kernel.READ_FILE) for name in ("zero", "urandom", "random")]
        rules.append(("/dev/null", kernel.READ_FILE | kernel.WRITE_FILE))
        self._without_folder = kernel.landlock_ruleset(rules)
        self._with_folder = kernel.landlock_ruleset([*rules, (self.folder, _OWN)])
        self._filter = _system_calls()
        self._limits = limits
        os.chdir(self.folder)

    def limit_launcher(self) -> None:
        """Set the limits that programs inherit, and let descriptors 0 to 2 be ``/dev/null``."""
        os.environ.clear()  # the interpreter adds a locale
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.close(null)
        for kind, limit in (
            (resource.RLIMIT_AS, _address_space_bytes() + self._limits.memory_bytes),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, MAX_DESCRIPTORS),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
        ):
            _, hard = resource.getrlimit(kind)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))

    def remove_folder(self) -> None:
        """Remove what is left of the folder; a mounted one ends with the launcher."""
        if not self.namespaces:
            self.empty_folder()
            os.rmdir(self.folder)

    def empty_folder(self) -> None:
        """Remove the files of the folder, which has no folders: a program can make none, and no links."""
        for name in os.listdir(self.folder):
            os.unlink(os.path.join(self.folder, name))

    def enter(
        self, channel: socket.socket, launcher: int, cpu_seconds: int, *, own_folder: bool
    ) -> socket.socket:
        """Confine this process, a fork of the launcher, permanently; all descriptors are closed but 0 to 2 and the channel.

        Args:
            launcher: process id of the parent.
            cpu_seconds: of all that the process does.
            own_folder: whether it may use the folder.

        Returns:
            the channel, at another descriptor.
        """
        kernel.die_with_parent(signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)
        kernel.landlock_restrict(self._with_folder if own_folder else self._without_folder)
        moved = os.dup2(channel.detach(), _CHANNEL)
        os.closerange(_CHANNEL + 1, MAX_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        return socket.socket(fileno=moved)

    def enter_filter(self) -> None:
        """The last layer: only the allowed system calls from here on, and small files; its standard input may be larger."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILES_BYTES, MAX_FILES_BYTES))
        self._filter.enter(os.getpid())


def mount_point(runtime: list[str]) -> str | None:
    """A folder of every Linux that holds no part of the runtime."""
    used = [os.path.realpath(path) + "/" for path in runtime]
    free = (path for path in _MOUNT_POINTS if not any(one.startswith(f"{path}/") for one in used))
    return next(filter(os.path.isdir, free), None)


def _mount_folder(runtime: list[str]) -> str:
    """Move to new namespaces and mount the programs' folder there; empty if that is not allowed, as in most pods."""
    folder = mount_point(runtime)
    if folder is None:
        return ""
    try:
        kernel.new_namespaces()
        kernel.mount_tmpfs(folder, MAX_FILES_BYTES, MAX_FILES)
    except OSError:
        return ""
    return folder


def _system_calls() -> kernel.SystemCallFilter:
    allowed = kernel.SystemCallFilter()
    allowed.allow(_ALLOWED.split())
    # The C library then uses clone and openat, whose arguments can be read.
    for name in ("clone3", "openat2"):
        allowed.refuse(name, errno.ENOSYS)
    allowed.allow_if("clone", (0, [_CLONE_THREAD], _CLONE_THREAD | _CLONE_NEW))
    # The first versions of Landlock do not see that O_TRUNC truncates a file that is opened for reading; none sees an opening with access
    # mode 3, for neither reading nor writing, which truncates too.
    flags = [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC]
    for name, argument in (("open", 1), ("openat", 2)):
        allowed.allow_if(name, (2 * argument, flags, os.O_ACCMODE | os.O_TRUNC | _O_TMPFILE))
    allowed.allow_if("fcntl", (2, _FCNTL, kernel.ALL))
    allowed.allow_if("ioctl", (2, _IOCTL, kernel.ALL))
    allowed.allow_if("pipe2", (2, [0], os.O_EXCL))  # O_NOTIFICATION_PIPE, of the kernel's notices
    allowed.allow_if("prctl", (0, _PRCTL, kernel.ALL))
    allowed.allow_if("prlimit64", (0, [0], kernel.ALL))
    allowed.allow_if("renameat2", (8, [0, 1], kernel.ALL))  # RENAME_NOREPLACE; another flag makes a device
    allowed.allow_if("socketpair", (0, [socket.AF_UNIX], kernel.ALL))  # asyncio needs one
    # Urgent data of Unix sockets have been a way into the kernel; and no address, that is, only to the other end.
    allowed.allow_if("recvfrom", (6, [0], socket.MSG_OOB))
    allowed.allow_if("sendto", (6, [0], socket.MSG_OOB), (8, [0], kernel.ALL), (9, [0], kernel.ALL))
    allowed.allow_if("tgkill", (0, [kernel.OWN_PROCESS], kernel.ALL))
    allowed.finish()
    return allowed


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def settle() -> None:
    """Have a later fork copy as little as possible."""
    gc.collect()
    gc.freeze()
