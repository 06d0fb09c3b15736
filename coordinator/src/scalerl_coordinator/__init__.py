"""Assigns prompts to generators, forms training batches, and journals the run's state.

The way of a rollout, from prompt to trained batch, by file; ``http`` checks each request before it gets here::

    lease      generator_endpoints    GeneratorEndpoints._lease(): an actor polls
               generator_requests     GeneratorRequests.offer()
               training_leases        TrainingLeases.choose(): new slots get prompts (samplers), open ones are assigned (scheduling)
               slots                  lease_limit() bounds staleness
               leases                 LeaseBook.add() starts the deadline
    heartbeat  generator_requests     GeneratorRequests.heartbeat() extends deadlines, .tick() closes leases after theirs
               slot_attempts          SlotAttempts.retry_slot(): who tries the slot next
    push       generator_endpoints    GeneratorEndpoints._push(): a group, decoded and as received
               pushed_groups          PushedGroups.receive()
               group_checks           summarize_group()
               pushed_groups          ._accept_training() ▶ rewards.rewards()
               response_store         ResponseStore.put(), beside the journal (generator.speculation)
    commit     core                   Core.commit(), of LeasesIssued, GroupAccepted, StepTrained, … (journal_records)
               transitions            apply(), live and in replay ▶ _issued(), _group_accepted()
               state                  CoordinatorState.fill_slot() closes a full step, and filters zero variance
               journaled_core         JournaledCore.decided(), and .poll() of leases, answer once the records are on disk
               journal                Journal.durable(): one sync for many records
               segment_files          SegmentFiles.append()
    shard      trainer_endpoints      TrainerEndpoints._next(): TRAIN, then ._shard() for each rank
               trainer_requests       TrainerRequests.next()
               shards                 plan_shard() ▶ balance(); StepGroups.of_plan() reads the groups ▶ fill_shard()
    step       trainer_endpoints      TrainerEndpoints._step(): the trainer's report
               trainer_requests       TrainerRequests.step()
               trainer_transitions    step_trained() ▶ step_figures.figures(), accounting.extend()
               run_file_writer        RunFileWriter.write_rows() ▶ files: RunFiles.write_rows() appends to metrics.jsonl
    publish    trainer_endpoints      TrainerEndpoints._publish_begin(), then ._publish_commit()
               trainer_requests       TrainerRequests.publish_begin()
               publish_permits        PublishPermits.decide(): which members get the version
               trainer_requests       TrainerRequests.publish_commit() ▶ Membership.set_version(), which raises the lease limit

``*_endpoints`` are asynchronous and do I/O; ``*_requests`` and what they call decide, without I/O and with the time as an
argument. A restart replays the journal: ``journaled_core.load_state``, ``recovery``. Members' heartbeats (``membership``) and leases'
deadlines (``leases``) are not journaled: a restart may lose them.

No torch, no model, no tokenizer, no work per token in Python, no client of this server. Weights do not pass this process.
"""
