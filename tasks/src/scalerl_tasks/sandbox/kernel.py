"""System calls that Python has no function for, by ctypes: Landlock, seccomp filters, capabilities, namespaces."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Iterable, Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

# linux/landlock.h. Access to files by the ABI version that has it.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on all architectures
_CREATE_VERSION = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << at for at in range(6))
MAKE_REG = 1 << 8
_FILE_ACCESS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
TRUNCATE = 1 << 14
_TCP = 0b11  # ABI 4: bind, connect
_SCOPES = 0b11  # ABI 6: abstract Unix sockets, signals
_O_PATH_CLOEXEC = 0o10000000 | os.O_CLOEXEC

# linux/sched.h, linux/mount.h
# User, mounts, network, IPC, UTS.
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 16384, 1 << 18

_BPF_LOAD, _BPF_AND, _BPF_RETURN = 0x20, 0x54, 0x06
_BPF_JUMP_EQUAL, _BPF_JUMP_AT_LEAST = 0x15, 0x35
ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # calls of the x32 ABI have the same architecture
ALL = 0xFFFFFFFF
OWN_PROCESS = 0x7FFFFFFE
"""Value of an argument that is the id of the process that enters a filter."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# Numbers on x86_64 and aarch64; -: no such call there.
_NUMBERS = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, ioctl 16 29, pread64 17 67,
pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216, msync 26 227,
madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101, getitimer 36 102, alarm 37 -, setitimer 38 103,
getpid 39 172, sendto 44 206, recvfrom 45 207, shutdown 48 210, socketpair 53 199, clone 56 220, exit 60 93, wait4 61 260,
uname 63 160, fcntl 72 25, ftruncate 77 46, getcwd 79 17, rename 82 -, unlink 87 -, readlink 89 -, umask 95 166,
gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176,
geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158, getresuid 118 148, getresgid 120 150,
getpgid 121 155, getsid 124 156, rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, sigaltstack 131 132,
sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
prctl 157 167, setrlimit 160 164, gettid 186 178, time 201 -, futex 202 98, sched_getaffinity 204 123, getdents64 217 61,
set_tid_address 218 96, restart_syscall 219 128, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
exit_group 231 94, epoll_wait 232 -, epoll_ctl 233 21, tgkill 234 131, openat 257 56, newfstatat 262 79, unlinkat 263 35,
readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99, epoll_pwait 281 22, eventfd2 290 19,
epoll_create1 291 20, dup3 292 24, pipe2 293 59, prlimit64 302 261, getcpu 309 168, renameat 264 38, renameat2 316 276, getrandom 318 278,
statx 332 291, rseq 334 293, clone3 435 435, openat2 437 437, faccessat2 439 439
"""


def syscall_numbers() -> dict[str, int]:
    """Number of each call of the table that this architecture has; empty on one that is not in it."""
    column, _ = _ARCHITECTURES.get(platform.machine(), (-1, 0))
    if column < 0:
        return {}
    rows = (entry.split() for entry in _NUMBERS.replace("\n", " ").split(","))
    return {name: int(number) for name, *numbers in rows if (number := numbers[column]) != "-"}


def no_new_privileges() -> None:
    """Refuse privileges by exec, as filters need. Permanent, and inherited."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")


def die_with_parent(signal: int) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def drop_capabilities() -> None:
    header = struct.pack("<II", 0x20080522, 0)  # version 3, this thread
    _check(_libc.capset(header, bytes(24)), "capset")


def new_namespaces() -> None:
    """Move to new user, mount, network, IPC and UTS namespaces, as the same user there.

    Raises:
        OSError: the kernel or a policy refuses; nothing has changed, or only the user namespace.
    """
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEW_NAMESPACES), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _check(_libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "mount")


def mount_tmpfs(folder: str, max_bytes: int, max_files: int) -> None:
    """Mount a file system in memory, of limited size, over a folder."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    options = f"size={max_bytes},nr_inodes={max_files},mode=700".encode()
    _check(_libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), options), "mount")


# --- Landlock --------------------------------------------------------------------------------------------


def landlock_version() -> int:
    """Version of the kernel's Landlock ABI; 0 without Landlock."""
    return max(0, int(_syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_CREATE_VERSION))))


def landlock_ruleset(rules: Iterable[tuple[str, int]]) -> int:
    """A descriptor of a ruleset: of files, only what is below each path may be accessed, as its rights say; paths that do not exist
    are skipped. No TCP, no signals and no abstract Unix sockets outside, as far as the kernel's version has them.
    """
    version = landlock_version()
    handled = max(rights for since, rights in _FILE_ACCESS.items() if since <= version)
    attributes = struct.pack("<QQQ", handled, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _check(
        _syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(size), ctypes.c_uint(0)),
        "landlock_create_ruleset",
    )
    for path, rights in rules:
        try:
            at = os.open(path, _O_PATH_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if not stat.S_ISDIR(os.fstat(at).st_mode):
                rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
            rule = struct.pack("<Qi", rights & handled, at)
            _check(
                _syscall(_LANDLOCK_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0)),
                "landlock_add_rule",
            )
        finally:
            os.close(at)
    return ruleset


def landlock_restrict(ruleset: int) -> None:
    """Apply a ruleset to this thread, permanently."""
    _check(_syscall(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0)), "landlock_restrict_self")


# --- seccomp ---------------------------------------------------------------------------------------------


_Code = list[tuple[int, int, int, int]]
_REFUSED: _Code = [(_BPF_RETURN, 0, 0, _ERRNO | errno.EPERM)]


class SystemCallFilter:
    """A program of the classic BPF: the allowed system calls; all others fail with an error. It is a binary search by number: a kernel
    runs it for each number there is when a process enters it.
    """

    def __init__(self) -> None:
        self._numbers = syscall_numbers()
        self._actions: dict[str, _Code] = {}

    def allow(self, names: Iterable[str]) -> None:
        self._actions |= {name: [(_BPF_RETURN, 0, 0, ALLOW)] for name in names}

    def refuse(self, name: str, error: int) -> None:
        """Have a call fail with an error of its own."""
        self._actions[name] = [(_BPF_RETURN, 0, 0, _ERRNO | error)]

    def allow_if(self, name: str, *conditions: tuple[int, Sequence[int], int]) -> None:
        """Allow a call if each half of an argument, masked, is one of its values: ``(half, values, mask)``, where the low half of argument
        ``n`` has the number ``2 * n``.
        """
        code: _Code = []
        for half, values, mask in conditions:
            code += [(_BPF_LOAD, 0, 0, _ARGUMENTS + 4 * half), (_BPF_AND, 0, 0, mask)]
            code += [(_BPF_JUMP_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)]
            code += _REFUSED
        self._actions[name] = [*code, (_BPF_RETURN, 0, 0, ALLOW)]

    def finish(self) -> None:
        """Refuse all other calls. Makes what :meth:`enter` needs, which runs in each program's process."""
        # First number, and what is done with all up to the next run.
        runs: list[tuple[int, _Code]] = [(0, _REFUSED)]
        actions = {self._numbers[name]: code for name, code in self._actions.items() if name in self._numbers}
        for number in sorted({at for one in actions for at in (one, one + 1)}):
            if (code := actions.get(number, _REFUSED)) != runs[-1][1]:
                runs.append((number, code))
        kill: _Code = [(_BPF_RETURN, 0, 0, _KILL_PROCESS)]
        _, architecture = _ARCHITECTURES[platform.machine()]
        program: _Code = [
            (_BPF_LOAD, 0, 0, _ARCHITECTURE),
            (_BPF_JUMP_EQUAL, 1, 0, architecture),
            *kill,
            (_BPF_LOAD, 0, 0, _NUMBER),
            *_search([*runs, (_X32, kill)]),
        ]
        self._pid_at = [at for at, one in enumerate(program) if one[::3] == (_BPF_JUMP_EQUAL, OWN_PROCESS)]
        self._bytes = bytearray(b"".join(struct.pack("<HBBI", *one) for one in program))
        code_bytes = (ctypes.c_char * len(self._bytes)).from_buffer(self._bytes)
        self._program = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code_bytes))

    def enter(self, pid: int) -> None:
        """Apply the filter to this process, permanently."""
        for at in self._pid_at:
            struct.pack_into("<I", self._bytes, 8 * at + 4, pid)
        _check(
            _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._program, 0, 0), "prctl(PR_SET_SECCOMP)"
        )


def _search(runs: Sequence[tuple[int, _Code]]) -> _Code:
    if len(runs) == 1:
        return runs[0][1]
    middle = len(runs) // 2
    below = _search(runs[:middle])
    return [(_BPF_JUMP_AT_LEAST, len(below), 0, runs[middle][0]), *below, *_search(runs[middle:])]


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
