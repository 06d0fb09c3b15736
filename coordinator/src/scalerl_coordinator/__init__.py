"""Assigns prompts to generators, forms training batches, and journals the run's state.

The way of a rollout, from prompt to trained batch::

    actor                    coordinator                                                           trainer
      │ POST lease             Server._lease() ▶ GeneratorRequests.receive_lease_request(), .offer()
      ├───────────────────────▶  slots.lease_limit() bounds staleness; TrainingLeases.choose() picks slots
      │◀── Leases ─────────────  Core.commit(LeasesIssued); LeaseBook.add() starts the deadline
      │ heartbeats               GeneratorRequests.heartbeat() ▶ LeaseBook.extend()
      │                          Core.tick() ▶ Core.close_lease(), Core.retry_slot() after a deadline
      │ POST groups            Server._push() ▶ GeneratorRequests.push()
      ├───────────────────────▶  group_checks.summarize_group() ▶ Core.commit(GroupAccepted, blob)
      │                            blob = ``Group`` as received, read again as ``StoredGroup``
      │                          generator_transitions.group_accepted() ▶ CoordinatorState.fill_slot()
      │                            closes a full step: rewards.zero_variance()
      │◀── PushReply ──────────  Server._store_responses() ▶ ResponseStore.put(), beside the journal (generator.speculation)
      │                                                                                           POST next │
      │                        Server._next() ▶ TrainerRequests.next() ─────────────────────── Next: TRAIN ▶│
      │                        Server._shard() ▶ TrainerRequests.plan_shard(): shards.balance()             │
      │                          StepGroups.of_plan() ▶ fill_shard() ──────────────────────────────▶ Shard ▶│
      │                        Server._step() ▶ TrainerRequests.step() ▶ Core.commit(StepTrained) ◀─ report │
      │                          RunFiles.write_rows() appends to metrics.jsonl
      │                        Server._next(), of members with older weights ─────────────── Next: PUBLISH ▶│
      │                          PublishPermits.to_update() ▶ Server._publish_begin() ────── PublishPermit ▶│
      │◀═══ weights, which this process does not see ═══════════════════════════════════════════════════════│
      │                        Server._publish_commit() ▶ TrainerRequests.publish_commit()        ◀─ report │
      │                          Membership.set_version() raises ``lease_limit``; Core.commit(Published)

Every :meth:`Core.commit` calls ``transitions.apply()`` on the :class:`CoordinatorState`, which finds the function of the
record's type in ``generator_transitions`` or ``trainer_transitions``, and queues the record;
``JournaledCore.decided()`` answers after ``Journal.durable()``. A restart replays the journal: ``load_state()``.

Members' heartbeats (``membership``) and leases' deadlines (``leases``) are not journaled: a restart may lose them.
No torch, no model, no tokenizer, no work per token in Python, no client of this server.
"""
