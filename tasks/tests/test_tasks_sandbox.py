"""Hostile programs in the sandbox: none reads, writes or reaches anything outside, outlives its limits, or learns its tests.

Each program prints what it managed to do, line by line; whatever it prints after ``ESCAPED`` is a failure. So the tests also fail
where a program did not even begin: each must print ``began`` first.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_processes import wait_until

from scalerl_tasks.errors import VerifierError
from scalerl_tasks.programs.verifier import CodeConfig, CodeVerifier
from scalerl_tasks.prompts import Prompt
from scalerl_tasks.sandbox import confinement, kernel
from scalerl_tasks.sandbox.confinement import MAX_DESCRIPTORS, Limits
from scalerl_tasks.sandbox.sandbox import Sandbox, ScriptResult
from scalerl_tasks.sandbox.values import plain

pytestmark = pytest.mark.skipif(
    bool(confinement.missing_from_kernel()), reason="the kernel offers no Landlock or seccomp"
)

LIMITS = Limits(cpu_seconds=1, memory_bytes=256 << 20, output_bytes=1 << 16, threads=16)
LONG_LIMITS = replace(LIMITS, cpu_seconds=120)
"""Of what has to end in its own way, however slow the machine is."""
SECRET = "the-token-of-the-run"

# What a program may try, and what it may not print after that. `call` makes a system call by its number.
PRELUDE = """
import ctypes, errno, os, sys, time
print("began", flush=True)
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result >= 0:
        print("ESCAPED", number, result, flush=True)
    return result
def attempt(function, *arguments, **named):
    try:
        result = function(*arguments, **named)
    except BaseException as error:
        print("refused:", type(error).__name__, flush=True)
    else:
        print("ESCAPED", function, str(result)[:100], flush=True)
PARENT = os.getppid()
"""

REFUSED = {
    # processes
    "fork": "attempt(os.fork)",
    "fork bomb": "for _ in range(1000): attempt(os.fork)",
    "double fork and a session of its own": "attempt(os.fork); attempt(os.setsid)",
    "vfork by number": "call(58)",
    "clone without threads": "call(56, 17, 0, 0, 0, 0)",
    "clone into new namespaces": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "call(435, ctypes.create_string_buffer(88), 88)",
    "exec": "attempt(os.execv, '/bin/sh', ['sh'])",
    "exec by posix_spawn": "attempt(os.posix_spawn, '/bin/true', ['true'], {})",
    "shell": "import subprocess; attempt(subprocess.run, ['id'], capture_output=True)",
    "multiprocessing": "import multiprocessing as m; attempt(m.get_context('fork').Process(target=print).start)",
    "system": "os.system('echo ESCAPED') == 0 and print('ESCAPED')",
    # files
    "password file": "attempt(open, '/etc/passwd')",
    "token file": "attempt(open, {secret!r})",
    "write to the grader's files": "attempt(open, {secret!r}, 'w'); attempt(open, {secret!r}, 'a'); attempt(os.remove, {secret!r})",
    "truncate": "attempt(os.truncate, {secret!r}, 0); call(2, ctypes.c_char_p({secret!r}.encode()), os.O_TRUNC, 0)",
    "list folders": "[attempt(os.listdir, path) for path in ('/', '/home', '/tmp', '/proc', '/etc', '/var', {folder!r})]",
    "symbolic link": "attempt(os.symlink, {secret!r}, 'link'); attempt(lambda: open('link').read())",
    "hard link": "attempt(os.link, {secret!r}, 'link')",
    "rename": "attempt(os.rename, {secret!r}, 'mine'); open('x', 'w').close(); attempt(os.rename, 'x', {folder!r} + '/x')",
    "file elsewhere": "[attempt(open, p + '/x', 'w') for p in ('/tmp', '/dev/shm', '/var/tmp', {folder!r}, '/usr/lib', sys.prefix)]",
    "folder": "attempt(os.mkdir, 'folder'); attempt(os.mkfifo, 'pipe'); attempt(os.mknod, 'node')",
    "modes": "attempt(os.chmod, '.', 0); attempt(os.chmod, {secret!r}, 0o777); attempt(os.utime, {secret!r})",
    "dot dot": "attempt(open, '../../../../../../etc/passwd'); attempt(os.chdir, '/'); attempt(os.chroot, '.')",
    "devices": "[attempt(open, '/dev/' + name, 'r+b') for name in ('mem', 'kmsg', 'tty', 'ptmx', 'fuse', 'kvm', 'vda', 'zero')]",
    "openat2": "call(437, -100, ctypes.c_char_p(b'/etc/passwd'), ctypes.create_string_buffer(24), 24)",
    "open by handle": "call(303, -100, ctypes.c_char_p(b'/etc/passwd'), ctypes.create_string_buffer(128), ctypes.create_string_buffer(8), 0); call(304, 0, ctypes.create_string_buffer(128), 0)",
    "runtime": "import json; attempt(open, json.__file__, 'a')",
    # other processes
    "proc of the parent": "[attempt(open, f'/proc/{{PARENT}}/{{n}}') for n in ('environ', 'mem', 'cmdline', 'maps', 'fd/0', 'root/etc/passwd')]",
    "own proc": "[attempt(open, f'/proc/self/{{n}}') for n in ('environ', 'mem', 'maps', 'status', 'root/etc/passwd')]",
    "links of the parent": "[attempt(os.readlink, f'/proc/{{PARENT}}/{{n}}') for n in ('exe', 'cwd', 'root', 'fd/0')]",
    "signals": "[attempt(os.kill, pid, s) for pid in (PARENT, 1, 0, -1, os.getpid()) for s in (0, 9, 15, 19)]",
    "signals by other calls": "[call(n, PARENT, 9) for n in (200,)]; call(234, PARENT, PARENT, 9); call(129, PARENT, 9, ctypes.create_string_buffer(128)); call(297, PARENT, PARENT, 9, ctypes.create_string_buffer(128))",
    "pidfd": "call(434, PARENT, 0); call(424, 3, 9, 0, 0); call(438, 3, 0, 0)",
    "signal by the owner of a descriptor": "import fcntl\nr, w = os.pipe()\nattempt(fcntl.fcntl, r, 8, PARENT); attempt(fcntl.fcntl, r, 10, 9); call(16, r, 0x8901, ctypes.byref(ctypes.c_int(PARENT)))",
    "ptrace": "[call(101, request, PARENT, 0, 0) for request in (0, 16, 0x4206)]",
    "memory of another": "call(310, PARENT, ctypes.create_string_buffer(16), 1, ctypes.create_string_buffer(16), 1, 0); call(311, PARENT, 0, 0, 0, 0, 0); call(440, 3, 0, 0, 0, 0)",
    "limits of another": "import resource\nattempt(resource.prlimit, PARENT, resource.RLIMIT_CPU, (1, 1)); call(302, PARENT, 0, 0, 0)",
    "priority and cores of another": "attempt(os.setpriority, os.PRIO_PROCESS, PARENT, 19); attempt(os.sched_setaffinity, PARENT, [0]); call(251, 1, PARENT, 0)",
    "higher limits": "import resource\n[attempt(resource.setrlimit, k, (-1, -1)) for k in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)]",
    # network
    "sockets": "import socket as s\n[attempt(s.socket, f, t) for f in (s.AF_INET, s.AF_INET6, s.AF_UNIX, s.AF_NETLINK, s.AF_PACKET, 38, 40, 44) for t in (1, 2, 3, 5)]",
    "name look-up": "import socket; attempt(socket.getaddrinfo, 'localhost', 80)",
    "abstract Unix socket": "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\nattempt(a.sendto, b'x', '\\0' + {name!r}); attempt(a.sendto, b'x', {folder!r} + '/socket'); attempt(a.bind, '\\0x'); attempt(a.connect, '\\0' + {name!r})",
    "address above four gigabytes": "import mmap\naddress = libc.mmap; address.restype = ctypes.c_void_p\nat = libc.mmap(ctypes.c_void_p(1 << 32), ctypes.c_size_t(4096), 3, 0x32, -1, 0)\nassert at == 1 << 32, at\nimport socket\na, b = socket.socketpair(1, 2)\nname = b'\\1\\0\\0' + {name!r}.encode()\nctypes.memmove(at, name, len(name))\ncall(44, a.fileno(), ctypes.c_char_p(b'x'), 1, 0, at, len(name)); ctypes.get_errno() == errno.EPERM or print('ESCAPED the filter', ctypes.get_errno())",
    "descriptor over a socket": "import socket\na, b = socket.socketpair()\nattempt(a.sendmsg, [b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b'\\1\\0\\0\\0')]); call(46, 1, 0, 0)",
    # kernel interfaces
    "io_uring": "call(425, 8, ctypes.create_string_buffer(120)); call(426, 3, 0, 0, 0, 0, 0)",
    "bpf, perf, keys": "call(321, 0, ctypes.create_string_buffer(128), 128); call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0); call(250, 0, -3, 0); call(248, 0, 0, 0, 0, 0); call(249, 0, 0, 0, 0)",
    "userfaultfd, memfd, secret memory": "call(323, 0); attempt(os.memfd_create, 'x'); call(447, 0)",
    "mounts": "call(165, ctypes.c_char_p(b'tmpfs'), ctypes.c_char_p(b'/tmp'), ctypes.c_char_p(b'tmpfs'), 0, 0); call(166, ctypes.c_char_p(b'/'), 2); call(428, -100, ctypes.c_char_p(b'/'), 0); call(430, ctypes.c_char_p(b'tmpfs'), 0); call(155, ctypes.c_char_p(b'.'), ctypes.c_char_p(b'.'))",
    "namespaces": "[call(272, flag) for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000)]; call(308, 3, 0)",
    "shared memory that stays": "call(29, 1234, 4096, 0o1600); call(64, 1, 1, 0o1600); call(68, 1, 0o1600); call(240, ctypes.c_char_p(b'/q'), 0o102, 0o600, 0)",
    "notices of files": "call(253); call(294, 0); call(300, 0, 0); call(254, 3, ctypes.c_char_p(b'/'), 1)",
    "locks": "import fcntl, json\nf = open(json.__file__)\nattempt(fcntl.flock, f, fcntl.LOCK_EX); attempt(fcntl.lockf, f, fcntl.LOCK_SH); attempt(fcntl.fcntl, f, 1024, 1)",
    "pipe of notices": "attempt(os.pipe2, os.O_EXCL)",
    "prctl": "[call(157, option, 1, 0, 0, 0) for option in (1, 4, 8, 36, 38, 47, 59)]",
    "a filter of its own": "call(317, 1, 8, ctypes.create_string_buffer(16)); call(444, 0, 0, 1); call(446, 3, 0)",
    "identity": "[attempt(f, 0) for f in (os.setuid, os.setgid)]; call(126, ctypes.create_string_buffer(8), ctypes.create_string_buffer(24)); call(135, 0)",
    "modules, reboot, clock": "call(175, 0, 0, 0); call(313, 0, 0, 0); call(169, 0, 0, 0, 0); attempt(time.clock_settime, 0, 0); call(103, 3, 0, 0); call(305, 0, 0)",
    "x32 system calls": "call(0x40000000 + 39)",
    "32-bit system calls": "import mmap\ncode = mmap.mmap(-1, 4096, prot=7)\ncode.write(bytes.fromhex('53b814000000cd805bc3'))\nprint('ESCAPED', ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())",
    "calls that are not in the list": "known = {known!r} | {{335, 336}}  # those two are no calls, but return from probes\nfor n in set(range(600)) - known:\n    ctypes.set_errno(0)\n    result = libc.syscall(ctypes.c_long(n), *[ctypes.c_long(-1)] * 6)\n    (result, ctypes.get_errno()) == (-1, errno.EPERM) or print('ESCAPED', n, result, ctypes.get_errno())",
    "access mode 3": "[call(2, ctypes.c_char_p({secret!r}.encode()), 3 | more, 0) for more in (0, os.O_TRUNC, os.O_TRUNC | os.O_CREAT, os.O_NONBLOCK)]\n[call(257, -100, ctypes.c_char_p({secret!r}.encode()), 3 | more, 0) for more in (0, os.O_TRUNC)]",
    "files without names": "attempt(os.open, '.', os.O_TMPFILE | os.O_RDWR)",
    "a device by renaming": "open('a', 'w').close()\ncall(316, -100, ctypes.c_char_p(b'a'), -100, ctypes.c_char_p(b'b'), 4); call(316, -100, ctypes.c_char_p(b'a'), -100, ctypes.c_char_p(b'a'), 2)",
    "threads with descriptors of their own": "call(56, 0x10F00 & ~0x400, 0, 0, 0, 0); ctypes.get_errno() == errno.EPERM or print('ESCAPED the filter')",
    "urgent data": "import socket\na, b = socket.socketpair()\nattempt(a.send, b'x', socket.MSG_OOB); attempt(b.recv, 1, socket.MSG_OOB | socket.MSG_DONTWAIT); ctypes.set_errno(0); call(45, b.fileno(), ctypes.create_string_buffer(8), 1, 0x41, 0, 0); ctypes.get_errno() == errno.EPERM or print('ESCAPED the filter')",
    "reading the tests": "import gc\nfound = [o for o in gc.get_objects() if isinstance(o, (dict, list)) and 'WANTED' in repr(o)[:10000]]\nnames = [k for k in sys.modules if 'suites' in k or 'verifier' in k]\n(found or names) and print('ESCAPED', found, names)",
    "environment": "os.environ and print('ESCAPED', dict(os.environ))",
    "descriptors": "left = []\nfor d in range(3, 1024):\n    try: os.fstat(d); left.append(d)\n    except OSError: pass\nleft and print('ESCAPED', left)",
}
"""What a program tries, by what it is. All is refused, and nothing of it is seen outside."""

EXHAUSTING = {
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", "exited"),
    "memory at once": ("x = bytearray(1 << 40)", "exited"),
    "memory that catches its errors": (
        "x = []\nwhile True:\n    try: x.append(bytearray(1 << 22))\n    except MemoryError: pass",
        "killed took",
    ),
    "shared mappings": ("import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 24))", "exited"),
    "processor": ("while True: pass", "killed took"),
    "processor, in C": ("sum(range(10 ** 12))", "killed took"),
    "processor, ignoring signals": (
        "import signal\n[signal.signal(s, signal.SIG_IGN) for s in range(1, 32) if s not in (9, 19)]\nwhile True: pass",
        "killed took",
    ),
    "sleep": ("import time\ntime.sleep(1000)", "took"),
    "sleep that catches everything": (
        "import time\nwhile True:\n    try: time.sleep(1000)\n    except BaseException: pass",
        "took",
    ),
    "reading what never comes": ("import os\nr, w = os.pipe()\nos.read(r, 1)", "took"),
    "stop": (
        "import signal, threading\nsignal.pthread_kill(threading.get_ident(), signal.SIGSTOP)\nprint(1)",
        "took",
    ),
    "output": ("while True: print('x' * 1000)", "wrote"),
    "output to errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "killed took"),
    "closed output": ("import os, time\nos.close(1)\ntime.sleep(1000)", "took"),
    "recursion": ("def f(n): return f(n + 1)\nf(0)", "exited killed"),
    "recursion in C": ("x = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x)", "exited killed took"),
    "nested brackets": ("(" * 100_000, "compile"),
    "nested operators": ("x = " + "-" * 500_000 + "1", "compile exited killed"),
    "threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
        "threads took",
    ),
    "threads of small stacks": (
        "import threading, time\nthreading.stack_size(32768)\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(100,)).start()\n    except RuntimeError: pass",
        "threads",
    ),
    "a thread that stays": (
        "import threading, time\nthreading.Thread(target=lambda: time.sleep(1000)).start()",
        "took",
    ),
    "ten thousand files": ("for i in range(10_000): open(str(i), 'w').write('x')", "files exited"),
    "disk": (
        "n = 0\nwhile True:\n    open(str(n % 200), 'ab').write(b'x' * (1 << 20)); n += 1",
        "files exited",
    ),
    "deleted files": (
        "import os\nkept = []\nwhile True:\n    f = open('x', 'wb')\n    os.unlink('x'); kept.append(f)\n    for _ in range(15): f.write(b'x' * (1 << 20)); f.flush()",
        "files exited",
    ),
    "deleted files that are mapped": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nwhile True:\n    f = open('x', 'w+b')\n"
        "    f.write(b'x' * (1 << 20)); f.flush()\n    libc.mmap(None, 4096, 1, 2, f.fileno(), 0); os.unlink('x'); f.close()",
        "files exited",
    ),
    "one large file": ("f = open('x', 'wb')\nf.truncate(1 << 40)", "exited"),
    "sparse files": (
        "for i in range(1000):\n    with open(str(i), 'wb') as f: f.truncate(1 << 20); f.write(b'x' * 65536)",
        "files exited",
    ),
    "open descriptors": ("import os\nx = [os.dup(0) for _ in range(10_000)]", "exited"),
    "pipes": ("import os\nx = [os.pipe() for _ in range(10_000)]", "exited"),
    "exit at finalization": ("import atexit, time\natexit.register(time.sleep, 1000)", "took"),
    "crash": ("import ctypes\nctypes.string_at(0)", "killed"),
    "timers": (
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *_: None)\nsignal.setitimer(signal.ITIMER_REAL, 1e-5, 1e-5)\nwhile True: pass",
        "killed took",
    ),
    "a large number": ("x = 10 ** (10 ** 9)", "exited killed took"),
    "regular expression": ("import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')", "killed took"),
}
"""What a program uses up, and words of which one says how it ended."""


@contextlib.contextmanager
def _many_descriptors() -> Iterator[None]:
    """As in a grader with many open files: what is opened next has a number above those that a program can have."""
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(2 * MAX_DESCRIPTORS)]
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALERL_TOKEN", SECRET)
        with _many_descriptors():
            one = Sandbox.start(LONG_LIMITS)
        yield one
        one.close()


@pytest.fixture(scope="module")
def without_namespaces() -> Iterator[Sandbox]:
    """As in a restricted pod, whose runtime refuses namespaces."""
    with _many_descriptors():
        one = Sandbox.start(LONG_LIMITS, namespaces=False)
    assert not one.namespaces
    yield one
    one.close()


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder with a secret and sockets that must stay untouched."""
    secret = tmp_path / "token"
    secret.write_text(SECRET)
    listeners = []
    for address in (f"\0{_name(tmp_path)}", str(tmp_path / "socket")):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.bind(address)
        listener.setblocking(False)
        listeners.append(listener)
    before = sorted(path.name for path in tmp_path.iterdir())
    mode = secret.stat().st_mode
    yield tmp_path
    assert secret.read_text() == SECRET
    assert secret.stat().st_mode == mode
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    for listener in listeners:
        with pytest.raises(BlockingIOError):
            listener.recv(10)
        listener.close()


def _name(folder: Path) -> str:
    return f"scalerl-test-{os.getpid()}-{folder.name}"


def _programs(folder: Path | None = None) -> list[str]:
    """Commands of the processes below this process's launchers, or below that of the folder for temporary files."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            launcher = path.parent / _stat(path)[1]
            command = (launcher / "cmdline").read_bytes()
            ours = str(folder).encode() in command if folder else _stat(launcher)[1] == str(os.getpid())
            if b"launcher.main" in command and ours:
                found.append(path.name)
    return found


def _stat(path: Path) -> list[str]:
    return (path / "stat").read_text().rpartition(")")[2].split()


@pytest.mark.parametrize("layers", ["namespaces", "pod"])
@pytest.mark.parametrize("what", REFUSED)
def test_program_reaches_nothing_outside(
    request: pytest.FixtureRequest, outside: Path, what: str, layers: str
) -> None:
    one: Sandbox = request.getfixturevalue("sandbox" if layers == "namespaces" else "without_namespaces")
    program = PRELUDE + (
        REFUSED[what]
        .replace("{secret!r}", repr(str(outside / "token")))
        .replace("{folder!r}", repr(str(outside)))
        .replace("{name!r}", repr(_name(outside)))
        .replace("{known!r}", repr(set(kernel.syscall_numbers().values())))
        .replace("{{", "{")
        .replace("}}", "}")
    )
    result = one.run(program, "", 120)
    assert result.output.startswith("began"), result
    assert "ESCAPED" not in result.output, result.output
    assert SECRET not in result.output
    assert result.problem == "" or "killed by signal 31" in result.problem, result  # what the filter kills
    assert not _programs()


@pytest.mark.parametrize("what", EXHAUSTING)
def test_program_ends_at_its_limits(without_namespaces: Sandbox, what: str) -> None:
    program, words = EXHAUSTING[what]
    limit = 0.5 if "took" in words else 120.0
    started = time.monotonic()
    result = without_namespaces.run(program, "", limit)
    seconds = time.monotonic() - started
    assert result.problem, result
    assert any(word in result.problem for word in words.split()), result
    assert len(result.output) <= LIMITS.output_bytes
    assert seconds < limit + 60
    assert not _programs()
    # The next program finds a clean folder, and its own share of everything.
    assert without_namespaces.run("import os\nprint(os.listdir('.'), input())", "in", 120).output == "[] in\n"


@pytest.mark.parametrize("what", ["disk", "ten thousand files", "sparse files"])
def test_files_are_limited_by_the_file_system(sandbox: Sandbox, what: str) -> None:
    if not sandbox.namespaces:
        pytest.skip("no namespaces here")
    result = sandbox.run(EXHAUSTING[what][0], "", 120)
    assert result.problem == "exited with status 1"
    assert sandbox.run("import os\nprint(os.listdir('.'))", "", 120).output == "[]\n"


def test_files_that_come_and_go_do_not_end_the_launcher(without_namespaces: Sandbox) -> None:
    """Files deleted while the launcher counts them; what standard input holds is not counted."""
    program = (
        "import os, time\nopen('kept', 'wb').write(bytes(4 << 20))\nend = time.monotonic() + 0.6\nwhile time.monotonic() < end:\n"
        "    open('x', 'w').close(); os.listdir('.'); os.remove('x')\nprint(len(input()))"
    )
    size = 15 << 20
    assert without_namespaces.run(program, "x" * size, 120) == ScriptResult(f"{size}\n")


def test_program_has_a_folder_and_the_runtime(sandbox: Sandbox, without_namespaces: Sandbox) -> None:
    program = (
        "import asyncio, os, threading, json, numpy\n"
        "open('a', 'w').write('x'); os.rename('a', 'b'); print(open('b').read(), os.listdir('.')); os.remove('b')\n"
        "print(sum([1, 2], 3), List[int], deque([1]), gcd(4, 6), int(numpy.arange(4).sum()))\n"
        "thread = threading.Thread(target=lambda: print('thread')); thread.start(); thread.join()\n"
        "async def main(): await asyncio.sleep(0); print('async', input())\n"
        "asyncio.run(main())\n"
        "print(len(os.urandom(3)), open('/dev/null').read() == '')\n"
    )
    wanted = "x ['b']\n6 typing.List[int] deque([1]) 2 6\nthread\nasync line\n3 True\n"
    for one in (sandbox, without_namespaces):
        assert one.run(program, "line\n", 120) == ScriptResult(wanted)


def test_folder_is_not_mounted_over_the_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in /mnt would be hidden by a file system that is mounted there."""
    one, two = tmp_path / "media", tmp_path / "srv"
    for folder in (one, two):
        folder.mkdir()
    monkeypatch.setattr(confinement, "_MOUNT_POINTS", (str(tmp_path / "missing"), str(one), str(two)))
    assert confinement.mount_point(["/usr/lib"]) == str(one)
    assert confinement.mount_point([f"{one}/venv/lib"]) == str(two)
    assert confinement.mount_point([str(one), f"{two}/lib"]) is None


CALLER = """
from scalerl_tasks.sandbox.confinement import MAX_DESCRIPTORS, Limits
from scalerl_tasks.sandbox.sandbox import Sandbox
one = Sandbox.start(Limits(), namespaces=False)
print("started", flush=True)
one.run("import time\\ntime.sleep(3600)", "", 3600)
"""


def test_programs_end_with_the_caller(tmp_path: Path) -> None:
    """A launcher whose caller is killed kills what runs, and removes its folder."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", CALLER], stdout=subprocess.PIPE, env=environment) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"started\n"
        wait_until(lambda: _programs(tmp_path))
        assert list(tmp_path.iterdir())
        caller.kill()
    wait_until(lambda: not _programs(tmp_path) and not any(tmp_path.iterdir()))


# --- tests cannot be forged --------------------------------------------------------------------------------

ASSERTS = json.dumps(["assert f(1) == 'WANTED'", "assert list(f(2)) == [1, 2]"])
PLAIN_ASSERTS = json.dumps(["assert f(1) == 'WANTED'", "assert f(2) == [1, 2]"])
PYTEST = "from solution import f\ndef test_a():\n    assert f(1) == 'WANTED'\ndef test_b():\n    assert sorted(f(2)) == [1, 2]\n"
CHECK = (
    "def check(candidate):\n    assert candidate(1) == 'WANTED'\n    assert abs(candidate(2) - 5) < 1e-6\n"
)
CALLS = json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": ["WANTED", [1, 2]]})
CLOSE = [
    "assert abs(f(2) - 5) < 1e-6",
    "assert not 5 - f(2)",
    "assert math.fabs(f(2) - 5) < 1",
    "assert round(f(2) - 5, 3) == 0",
    "assert f(2) % 7 == 5",
    "assert 5 in [f(2)]",
    "assert 5 in f(3)",
    "assert all(map(lambda x: f(x) == 5, [2, 2]))",
]
"""Other ways to write that f(2) is 5."""
SUITES = {
    "asserts": (ASSERTS, {}),
    "plain asserts": (PLAIN_ASSERTS, {}),
    "pytest": (PYTEST, {}),
    "check": (CHECK, {"entry_point": "f"}),
    "calls": (CALLS, {}),
}

FORGERS = {
    "equal to all": "class E:\n    def __eq__(s, o): return True\n    __hash__ = None\ndef f(x): return E()",
    "ordered before and after all": "class E(int):\n    def __lt__(s, o): return True\n    __le__ = __gt__ = __ge__ = __eq__ = __lt__\n    def __sub__(s, o): return s\n    def __abs__(s): return s\ndef f(x): return E()",
    "arithmetic of its own": "class E:\n    def __sub__(s, o): return s\n    __abs__ = lambda s: s\n    __lt__ = lambda s, o: True\n    __eq__ = __lt__\n    __iter__ = lambda s: iter([s])\ndef f(x): return E()",
    "a difference of its own": "class E:\n    def __sub__(s, o): return 0.0\n    __rsub__ = __mod__ = __sub__\ndef f(x): return E()",
    "a difference and its size": "class E:\n    def __sub__(s, o): return s\n    __rsub__ = __mod__ = __neg__ = __sub__\n    def __abs__(s): return 0.0\n    __float__ = __abs__\n    __bool__ = lambda s: False\n    __round__ = lambda *s: 0\ndef f(x): return E()",
    "contains all": "class E:\n    def __contains__(s, o): return True\ndef f(x): return E()",
    "StopIteration": "def f(x): raise StopIteration",
    "patched builtins": "import builtins\nbuiltins.sorted = lambda x: [1, 2]\nbuiltins.abs = lambda x: 0\nbuiltins.print = builtins.len = None\ndef f(x): return x",
    "names of builtins": "def sorted(x): return [1, 2]\ndef abs(x): return 0\ndef check(x): pass\ndef f(x): return x",
    "exit": "import os\ndef f(x): os._exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "SystemExit": "import sys\ndef f(x): sys.exit(0)",
    "SystemExit at once": "raise SystemExit",
    "patched exit": "import sys, os\nsys.exit = os._exit = exit = quit = lambda *_: None\ndef f(x): raise SystemExit(0)",
    "no function": "pass",
    "messages of its own": "import os, json, struct\nfor m in ({'compiled': True}, {'value': True}, {'passed': True}, {'count': 0}, {'passed': True}):\n    d = json.dumps(m).encode()\n    os.write(3, struct.pack('<I', len(d)) + d)\ndef f(x): return True",
    "results of the tester": "import os, json, struct\nfor m in ({'count': 2}, {'passed': True}, {'passed': True}):\n    d = b'R' + json.dumps(m).encode()\n    os.write(3, struct.pack('<I', len(d)) + d)\ndef f(x): return True",
    "rubbish": "import os\nos.write(3, os.urandom(1000))\ndef f(x): return True",
    "a huge message": "import os\nos.write(3, b'\\xff\\xff\\xff\\x7f' + b'x' * 100000)\ndef f(x): return True",
    "deep data": "def f(x):\n    y = []\n    for _ in range(20000): y = [y]\n    return y",
    "references to nothing": "import os, json, struct\nd = json.dumps({'compiled': True}).encode(); os.write(3, struct.pack('<I', len(d)) + d)\nd = json.dumps({'value': {'object': 10 ** 9, 'of': 'x'}}).encode()\nfor _ in range(50): os.write(3, struct.pack('<I', len(d)) + d)\ndef f(x): return 1",
    "frames and gc": "import gc, sys\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, (str, list, dict, tuple)) and 'WANT' 'ED' in repr(o)[:100000]: return 'WANT' 'ED'\n    frame = sys._getframe()\n    while frame:\n        if any('WANT' 'ED' in repr(v) for v in frame.f_locals.values()): return 'WANT' 'ED'\n        frame = frame.f_back\n    return x",
    "a file for the tests": "open('solution.py', 'w').write('def f(x): return 1')\nopen('pytest.py', 'w').write('raise SystemExit')\nopen('conftest.py', 'w').write('')\ndef f(x): return x",
    "a patched json": "import json\njson.dumps = json.loads = lambda *a, **k: '{}'\ndef f(x): return x",
    "its own module": "import sys\nsys.modules['tests'] = sys.modules['solution'] = None\ndef f(x): return x",
    "an argument that it keeps": "def f(x, _=[]):\n    _.append(x)\n    return _",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return x",
    "nothing but a loop": "def f(x):\n    while True: pass",
    "infinite iterator": "import itertools\ndef f(x): return itertools.count()",
    "an exception that is not one": "class E(BaseException):\n    def __str__(s): raise s\ndef f(x): raise E()",
}


@pytest.fixture(scope="module")
def verifier() -> Iterator[CodeVerifier]:
    with CodeVerifier(CodeConfig("All", LIMITS, seconds=2)) as one:
        yield one


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("forger", FORGERS)
def test_program_cannot_forge_its_result(verifier: CodeVerifier, forger: str, suite: str) -> None:
    answer, metadata = SUITES[suite]
    started = time.monotonic()
    assert verifier.score(Prompt("p", "", answer, metadata=metadata), FORGERS[forger]).score == 0
    assert time.monotonic() - started < 60
    assert not _programs()


@pytest.fixture(scope="module")
def unhurried_verifier() -> Iterator[CodeVerifier]:
    with CodeVerifier(CodeConfig("All", LONG_LIMITS, seconds=120)) as one:
        yield one


@pytest.mark.parametrize("suite", SUITES)
def test_right_program_passes(unhurried_verifier: CodeVerifier, suite: str) -> None:
    """The tests above fail for what the programs do, not for the tests."""
    answer, metadata = SUITES[suite]
    two = 5 if suite == "check" else [1, 2]
    program = f"def f(x): return 'WANTED' if x == 1 else {two}"
    assert unhurried_verifier.score(Prompt("p", "", answer, metadata=metadata), program).score == 1


def test_program_cannot_forge_a_comparison() -> None:
    prompt = Prompt("p", "", json.dumps(CLOSE))
    with CodeVerifier(CodeConfig("Share", LIMITS, seconds=4)) as verifier:
        for forger, program in FORGERS.items():
            if forger not in ("nothing but a loop", "infinite iterator"):  # the latter has a 5
                assert verifier.score(prompt, program).score == 0, forger


def test_objects_of_the_program_can_be_used(unhurried_verifier: CodeVerifier) -> None:
    """Arithmetic gives objects, and membership is what they iterate over."""
    program = (
        "class V:\n    def __init__(s, *x): s.x = x\n    def __mul__(s, k): return V(*(k * y for y in s.x))\n"
        "    __rmul__ = __mul__\n    def __eq__(s, o): return s.x == o.x\n    def __iter__(s): return iter(s.x)\n"
        "    def __abs__(s): return sum(map(abs, s.x))\n    def __matmul__(s, o): return sum(map(lambda a, b: a * b, s.x, o.x))\n"
        "def f(x): return 5 if x == 2 else V(4, 5)\n"
    )
    tests = [
        "assert V(1, 2) * 2 == 2 * V(1, 2) == V(2, 4) and (V(1, 2) * 2).x == (2, 4)",
        "assert abs(V(1, -2)) == 3 and V(1, 2) @ V(3, 4) == 11",
        "assert 4 in V(3, 4) and 5 not in V(3, 4)",
        *CLOSE,
    ]
    assert unhurried_verifier.score(Prompt("p", "", json.dumps(tests)), program).score == 1


RAW = """import json, os, struct, time
def send(text):
    os.write(3, struct.pack('<I', len(text)) + text.encode())
send('{"compiled": true}')
send(%s)
def f(*x): return 1
time.sleep(5)
"""
MESSAGES = {
    "no list": """'{"value": {"F": []}}'""",
    "no numbers": """'{"value": {"i": []}}'""",
    "no pairs": """'{"value": {"d": [7]}}'""",
    "a long key": """'{"value": {"d": [[{"i": "0x' + 'f' * 9000 + '"}, 1]]}}'""",
    "deep value": """'{"value":' + '[' * 900 + ']' * 900 + '}'""",
    "deep error": """'{"raised": {"exception":' + '[' * 900 + ']' * 900 + '}}'""",
    "no object": "'[1]'",
}
"""Messages that a program writes itself, as Python."""


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_of_a_program_are_checked(verifier: CodeVerifier, message: str) -> None:
    """A program that writes to its socket fails its tests, not the grader."""
    assert verifier.score(Prompt("p", "", CALLS), RAW % MESSAGES[message]).score == 0


def test_values_of_a_program_are_quick_to_read() -> None:
    """The grader has no time limit of its own when it reads a value."""
    same_hash: list[Any] = [{"i": hex(n * (2**61 - 1))} for n in range(20_000)]
    keys = plain({"d": [[key, 1] for key in same_hash]})
    assert len({hash(key) for key in keys}) > 19_000
    nested: Any = 1
    for _ in range(60):
        nested = {"d": [[nested, 1]]}
    with pytest.raises(TypeError, match="unhashable"):  # texts in texts would grow exponentially
        plain(nested)
    others: list[Any] = [{"s": same_hash}, {"z": []}, {"F": ["0x1", "0x" + "f" * 9999]}, {"D": "1" * 9999}]
    for data in (*others, {"object": 1}):
        with pytest.raises(ValueError, match="not plain data"):
            plain(data)


# --- what the kernel must have ----------------------------------------------------------------------------


def test_kernel_without_landlock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    with pytest.raises(VerifierError, match=r"there is no Landlock \(Linux 5.13 .* or grade by a service"):
        CodeVerifier(CodeConfig())


def test_other_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(VerifierError, match="an architecture of x86_64 and aarch64"):
        CodeVerifier(CodeConfig())


def test_broken_sandbox_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "missing"))
    with pytest.raises(VerifierError, match="cannot be set up: FileNotFoundError"):
        Sandbox.start(replace(LIMITS), namespaces=False)
