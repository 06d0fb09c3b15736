"""Checkpoints: what is in one, when and how it is written, which one a start loads, and the copies in an object store.

A checkpoint on rank 0 (``when_to_save``) and on all ranks::

    when_to_save ──▶ write: Checkpointer ──▶ volume: step-<step>/ ──▶ upload ──▶ object_store
                       ▲                        │                                   │
      host_copy ───────┘                        └────▶ load: CheckpointLoader ◀─────┘

    ``manifest``      sizes and hashes of a checkpoint's files
    ``engine_files``  the engine's state in them; ``random_state`` those of a rank's random generators
    ``host_copy``     the copy of a rank's state, from which its files are written while training continues
    ``disk``          system calls, and the state of the volume

This package does not choose what a checkpoint has of the engine (``engine.state``), and does not export models (``exporter``).
"""
