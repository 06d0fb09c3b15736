"""The trainer: rollouts in, better weights out.

A step and its publish, on rank 0 (``leader``) and on all ranks (``worker``)::

    coordinator      Leader.lead()                    every rank: Worker.follow()                     generators
       │ TRAIN step    Leader._train() ─ order ─▶      Worker.train()
       ├─ shard ───────────────────────────────▶         rank_batch() ▶ pack() rows of tokens
       │                                                 advantages() ▶ engine: Engine.step()
       │                                                   losses, aggregation.per_token(); DeepSpeed's update
       │◀ step report ──────────────────────── sums ──  Trained
       │ PUBLISH       Leader._publish() ─ order ─▶    Worker.gather() whole parameters, a bucket at a time
       │                 Publisher.publish()
       │                   buckets ▶ open_group() ▶ fill() ▶ start_broadcast() ────────────────▶ │
       │                   probe() the same tokens on both sides ◀────────────────────────── log-probs ────┤
       │ every n steps Leader._save() ▶ saving: files of all ranks, committed by a rename

What lives here
    ``algo``      losses, advantages, aggregation, mismatch: pure functions of tensors
    ``packing``   sequences to rows and micro-batches, and back to one flat order of tokens
    ``models``    a policy from the hub, from a folder, or from scratch; its head; its size in bytes
    ``engine``    the update itself; the one place that imports DeepSpeed
    ``sft``       supervised warm start through the same engine
    ``prepare``   the run's model into its directory before anything starts, and by ``checks`` all that would
                  otherwise end the run later
    ``main``      one rank's process; ``leader`` gives its orders, ``worker`` is what they mean, ``ranks`` how ranks
                  talk, ``recipe`` and ``start`` turn the spec into what the parts are told
    ``launch``    the ranks of one pod, a process each
    ``batch``     a share of a step, from the wire to tensors
    ``publish``   weights to the generators
    ``saving``    checkpoints as all ranks make them together, ``checkpoint`` their files
    ``errors``    everything that this package raises on purpose

What never lives here
    Choosing prompts, grading, staleness rules (the coordinator's); sampling (the generator's); anything of
    Kubernetes; vLLM. ``algo`` does no I/O, knows no rank and no clock.

This module imports nothing, so that naming the package costs nothing (torch and DeepSpeed take seconds).
"""
