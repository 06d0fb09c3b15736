"""Trains the policy on rollouts, publishes the weights to the generators, and writes checkpoints.

A step and its publish, on rank 0 (``leader``) and on all ranks (``worker``)::

    coordinator      Leader.lead()                    every rank: Worker.follow()                     generators
       │ TRAIN step    Leader._train() ─ Command ─▶    Worker.train()
       ├─ next shard ──────────────────────────▶         Prefetch: rank_batch(): advantages(), sequence_weights() ▶ Engine.pack()
       │                                                 Engine.step(): Passes.accumulate(), for each micro-batch:
       │                                                   Policy ▶ log-probs ▶ Loss ▶ Backend.backward()
       │                                                 Backend.step(): gradients ▶ weights of the next version
       │◀ step report ──────────────────────── sums ──  Trained
       │ PUBLISH       PermittedPublishes.publish() ────▶ Worker.gather() whole parameters, a bucket at a time, while
       │                 Publisher.publish()               the next step is computed; its update waits
       │                   GroupPublisher: open_group() ▶ fill() a bucket ▶ start_broadcast() ─────────────▶ │
       │                   or FilePublisher: WeightWriter.write() ▶ files, which the generators read         │
       │                   both: ActorControl.start(), a request to each actor ────────────────── receive ──▶ │
       │                   probe() the same tokens on both sides ◀────────────────────────── log-probs ────┤
       │◀ commit ───────   Coordinator.publish_commit(): which members hold the version
       │ every n steps RunCheckpoints.save() ▶ Checkpointer.start(): files of all ranks, committed by a rename

    ``algo``          losses, advantages, aggregation, mismatch: pure functions of tensors
    ``packing``       sequences to rows and micro-batches, and back to one flat order of tokens; ``row_layout`` which
                      sequences share them
    ``models``        the policy: loading, from scratch, head
    ``engine``        the update, by DeepSpeed or FSDP2
    ``sft``           supervised steps; ``mid_training`` runs them from the spec, with checkpoints, on the pairs of
                      ``mid_training_examples``
    ``prepare``       writes the run's model into its directory; ``checks`` finds errors that would end the run later,
                      ``model_checks`` those of the model's folder, also for ``scalerl validate``
    ``fork``          copies another run's checkpoint into the directory of a new one
    ``launch``        starts the ranks of one pod, a process each
    ``main``          one rank's process; ``leader`` sends commands, ``worker`` executes them, ``ranks`` has the collectives
    ``spec_settings`` derives settings from the spec
    ``background``    threads beside a step: fetches the next one, publishes the one before
    ``shard_conversion``
                      a shard of a step from the wire to a ``TrainBatch`` of tensors (``train_batch``), with advantages and weights
    ``publish``       sends weights to the generators
    ``checkpoints``   what is in a checkpoint, how it is written, found again and copied to an object store
    ``exporter``      exports models of evaluated versions; ``export`` writes them, ``export_targets`` copies them elsewhere

This package does not choose prompts, grade or decide staleness (the coordinator does), does not sample (the generator
does), and does not depend on Kubernetes or vLLM.

This module imports nothing, because importing torch and DeepSpeed takes seconds.
"""
