"""The ``scalerl`` command.

``scalerl fit``, from a file to text, JSON and picture::

    arguments ▶ main.main() ▶ run_fit()
                               ├ read_curve()   tables.* rows ▶ columns.* the columns to use ▶ checked points
                               ├ read_prior()   earlier runs, or why one is not used
                               └ analyse()      the fit, the check for collapse, the forecasts: one Analysis
                                   ├ report.*   text      ├ JSON      └ pictures.* PNG

``scalerl compare`` runs the missing runs with the code of ``scalerl run``, and compares (``curves.recipes``)::

    arguments ▶ main.main() ▶ run_compare() ▶ read_spec(), planned()   each variant and seed, and its directory
                               ├ run_spec()   the unfinished runs, one after the other
                               └ Comparison   Recipe: its runs' fits ▶ the rule of curvefit ▶ table.Table: text, Markdown, CSV; PNG

``scalerl run`` passes the spec to :mod:`scalerl_local` and prints its reports (``progress``). ``scalerl view`` serves a page (``page``).

``scalerl get``, ``why``, ``logs``, ``fetch`` and ``submit`` are for runs on a cluster (:mod:`.clusters`).

This package contains: arguments, output for people (progress, tables, pictures, error messages), exit codes, and
the checks that need more than the spec: files, tasks, this machine.

It does not contain: code that decides about a run or starts a process (the operator does that), or an import
that delays the first child process: matplotlib, scipy and aiohttp are imported where they are used.

A command that cannot go on raises ``exits.Refused``, in whose place ``main`` prints the reasons.

Exit codes: 0 done, 1 failed, 2 bad input (nothing started), 130 interrupted; on a cluster also 3 not found, 4 not allowed.
"""
