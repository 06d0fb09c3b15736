"""Checkpoints: what is in one, how it is written, found again and copied.

::

    when_to_save ─▶ write ─▶ volume ─▶ upload ─▶ object_store
                      │         ▲                    │
    engine_files ─────┘         └─────── load ◀──────┘
    host_copy

``manifest`` and ``disk`` have the names, hashes and system calls that all of them use.
"""
