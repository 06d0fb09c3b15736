"""The ``scalerl`` command.

Lives here: arguments, what a person reads (views, tables, pictures, error messages), exit codes, and
the checks that need more than the spec: files, tasks, this machine.

Never lives here: anything that decides about a run or starts a process (that is the operator's), or
an import that the first child process would have to wait for: matplotlib, scipy, rich and aiohttp
are imported where they are used.

Exit codes: 0 done, 1 failed, 2 bad input (nothing started), 130 interrupted.
"""
