"""Trains the policy on rollouts, publishes the weights to the generators, and writes checkpoints.

A step, its publish and its checkpoint, by file. Rank 0 leads (``leader``) by the coordinator's answers; each of its commands is executed
by all ranks (``worker``)::

    step     leader                     Leader._train(): a Command to every rank
             worker                     Worker.train(), with the shard that was fetched beside the last step
             background                 Prefetch, a thread:
             shard_conversion             rank_batch(): algo.advantages, algo.aggregation ▶ TrainBatch
             train_batch                  pack_shard() ▶ packing.pack(): rows, micro-batches
             engine/training_step       Engine.step()
             engine/passes              Passes.accumulate(), for each micro-batch: models.policy, models.head ▶ log-probabilities ▶ algo.losses
             engine/backend             Backend.backward(); Backend.step(): gradients ▶ weights of the next version, in
                                        engine/deepspeed_backend or engine/fsdp_backend
             step_stats                 stats_of_step() of all ranks
             coordinator_client         Coordinator.report()
    publish  publishes                  PermittedPublishes.publish(): the coordinator's permission; then beside the next step, whose
                                        update waits until the weights are read:
             publish/published_weights  weights_to_publish(): whole weights or adapters
             engine/weights             Weights.gather_checkpoint(): whole parameters, a bucket at a time, by the backend
             publish/group_publisher    GroupPublisher: sender_group.open_group() ▶ fill() ▶ start_broadcast() ──▶ generators
                                        Rounds.after(): which members its next attempt has
             publish/file_publisher     or FilePublisher: weight_writer.WeightWriter.write() ▶ files, which they read
             weight_layout of api       both: the place of each tensor in a bucket
             publish/actor_control      both: ActorControl.start(), a request to each actor
             publish/probe              Prober.check() ▶ probe(): the same tokens on both sides
             coordinator_client         Coordinator.publish_commit(): which members hold the version
    save     checkpoints/when_to_save   RunCheckpoints.save(), every n steps
             checkpoints/write          Checkpointer.start(): files of all ranks, committed by a rename

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
    ``background``    threads beside a step: fetches the next one, publishes the one before
    ``publishes``     rank 0's publishes, from the permission to the commit
    ``shard_conversion``
                      a shard of a step from the wire to a ``TrainBatch`` of tensors (``train_batch``), with advantages and weights
    ``publish``       sends weights to the generators
    ``checkpoints``   what is in a checkpoint, how it is written, found again and copied to an object store
    ``exporter``      exports models of evaluated versions; ``export`` writes them, ``export_targets`` copies them elsewhere

This package does not choose prompts, grade or decide staleness (the coordinator does), does not sample (the generator
does), and does not depend on Kubernetes or vLLM.

This module imports nothing, because importing torch and DeepSpeed takes seconds.
"""
