"""Runs untrusted Python programs, each in a process of its own that reaches nothing else.

::

    grading process                 launcher (one, forked before any request)        program (one process each, forked)
    Sandbox.run() ──fork, limits──▶ fork(), watch(): time, threads, files ─────────▶ Confinement.enter(), then child.main()
        │          ◀──how it ended──    kills it at its limits                             ▲ source, input, calls
        └─────────────────────────────one socket per program─────────────────────────────┘ output, values

``kernel`` has the system calls, ``confinement`` the layers of a program's process, ``launcher`` the process that forks them,
``sandbox`` the caller's side, ``child`` what runs in the process, ``values`` the encoding of plain data between them, ``tester`` the
process of tests that are code, with ``remote``, which stands for the program there, and ``pytest_module``, which stands for pytest.

Rules: (1) A program's process never holds what its result is compared with: expected values stay with the caller, and tests
that are code run in another confined process, which calls the program through the caller. (2) The launcher passes a socket on
and reads nothing from it, so a program does not inherit another's source or input. (3) A program is one process, of few threads.
(4) What comes from a program is plain data, with a bounded size: no pickle, no code.

Each layer holds by itself what it can: no single one is relied on, and the kernel must have the first two.

===================  ==============================================================================================================
Landlock             no file but the Python runtime and ``/dev/null``, ``zero``, ``urandom`` (reading), and an own folder
seccomp              a list of allowed system calls: no process, no socket but a pair of its own, no signal to another process
rlimits              CPU time, memory, size and number of open files, no core dump
watch of launcher    wall-clock time, threads, all files together; ends with the caller
user namespace       where the kernel allows one: empty network, own IPC, own mounts, the folder a file system of limited size
===================  ==============================================================================================================
"""
