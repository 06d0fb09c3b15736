"""Child processes: how they start, end, and never outlive their parent. Standard library only.

::

    Supervisor     ChildProcess.start() ▶ start_with_socket() ─ lifeline ─▶ subreaper.main() ─ fork, die_with_parent() ─▶ the child
                   .stop(): SIGTERM, a grace, SIGKILL   .kill(): the tree   .wait(): its exit code ▶ describe()
    GradingPool    start_with_socket() ─ control ─▶ fork server ─ fork, die_with_parent() ─▶ graders         wait_or_kill()
    Launcher       subprocess, die_with_parent() ─▶ a rank; as process 1: reaped() ▶ exit codes, orphans'
    vLLM server    fork, die_with_parent() ─▶ engine

Below it: :mod:`.kernel` (system calls), :mod:`.process_table` (``/proc``: trees, marks, memory), :mod:`.waiting` (pauses and waits
that end with the first of several events). When a process is restarted, and what it runs, is its owner's.
"""
