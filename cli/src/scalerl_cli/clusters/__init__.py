"""The commands for runs on a cluster: ``get``, ``why``, ``logs``, ``fetch``, ``submit``; also as ``kubectl scalerl``.

::

    arguments ▶ Session: kubeconfig, context, namespace ▶ one request at a time, with the rights of the user
                 ├ runs.*    a run, or the record of one that was deleted
                 │   ├ get.*   a table, or JSON        ├ why.*  three lines
                 │   └ volume.*  files of the run: exec in its coordinator, or a short-lived pod ▶ fetch.*
                 ├ logs.*    its pods                  └ submit.*  checks of `scalerl validate` ▶ dry run ▶ apply

This package contains: requests of a user, and text for people. It does not contain: a decision about a run, or a right that the
user does not have. Each command names the right that is missing.
"""
