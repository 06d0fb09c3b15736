"""The ``scalerl`` command.

``scalerl fit``, from a file to text, JSON and picture::

    arguments ▶ main.main() ▶ run_fit()
                               ├ read_curve()   tables.* rows ▶ columns.* which of them ▶ checked points
                               ├ read_prior()   earlier runs, or why one does not count
                               └ analyse()      the fit, the check for collapse, the forecasts: one Analysis
                                   ├ report.*   text      ├ JSON      └ fit_picture.* PNG

``scalerl compare`` runs what is missing by ``scalerl run``'s own code, and compares (``curves.recipes``)::

    arguments ▶ main.main() ▶ run_compare() ▶ read_spec(), planned()   each variant and seed, and its directory
                               ├ run_spec()   one after the other: those that are not finished
                               └ Table   Recipe: its runs' fits ▶ the rule of curvefit ▶ Markdown, CSV, PNG

``scalerl run`` hands the file to :mod:`scalerl_operator.local` and shows what that reports (``view``).

Lives here: arguments, what a person reads (views, tables, pictures, error messages), exit codes, and
the checks that need more than the spec: files, tasks, this machine.

Never lives here: anything that decides about a run or starts a process (that is the operator's), or
an import that the first child process would have to wait for: matplotlib, scipy, rich and aiohttp
are imported where they are used.

Exit codes: 0 done, 1 failed, 2 bad input (nothing started), 130 interrupted.
"""
