"""The ``scalerl`` command.

``scalerl fit``, ``plan``, ``report``, ``plot`` and ``rollouts`` print and write what :mod:`scalerl_analysis` makes of files::

    arguments ▶ main.main() ▶ run_fit() ▶ analysed()   read, fitted: text, JSON, PNG

``scalerl compare`` runs the missing runs with the code of ``scalerl run``, and has their curves compared::

    arguments ▶ main.main() ▶ run_compare() ▶ read_spec(), planned()   each variant and seed, and its directory
                               ├ run_spec()   the unfinished runs, one after the other
                               └ Comparison   of scalerl_analysis: text, Markdown, CSV; PNG

``scalerl run`` passes the spec to :mod:`scalerl_local` and prints its reports (``progress``). ``scalerl view`` serves a page (``page``).

``scalerl get``, ``why``, ``logs``, ``fetch`` and ``submit`` are for runs on a cluster (:mod:`.clusters`).

This package contains: arguments, output for people (progress, error messages, the page of a run), exit codes, and
the checks that need more than the spec: files, tasks, this machine.

It does not contain: code that decides about a run or starts a process (:mod:`scalerl_lifecycle` and :mod:`scalerl_local` do
that), analysis of its files, or an import that delays the first child process: matplotlib, scipy and aiohttp are imported
where they are used.

A command that cannot go on raises ``exits.Refused``, in whose place ``main`` prints the reasons.

Exit codes: 0 done, 1 failed, 2 bad input (nothing started), 130 interrupted; on a cluster also 3 not found, 4 not allowed.
"""
