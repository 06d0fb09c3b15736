"""Generates rollouts: the vLLM server of a run, its plug-ins, and the actor that drives it.

A rollout, from a lease to a pushed group. ``actor.run_actor()`` starts the loops; files without a folder are those of ``rollouts/``::

    coordinator       actor                                                                   vLLM server
    1 │── leases ───▶ leasing            Leasing: occupancy and concurrency say how many           │
    2 │               generation         RolloutGenerator.generate(): encoded by prompt_codec      │
    3 │               completion_streams sample_plain(), CompletionStreams.extend()                │
    4 │               ../vllm_client     VllmClient.stream() ───────────────── POST generate ─────▶│
      │               ../vllm_replies    Part, Sampled ◀── token ids, log-probabilities, versions ─│
      │               partial_completion PartialCompletion: the tokens so far                      │
    5 │               generation         RolloutGenerator.grade(): a GradingPool; group_packing    │
    6 │◀─ groups ──── delivery           Delivery.run()                                            │

``../actor_parts`` constructs these parts and the clients that they call; ``../coordinator_client`` makes the requests of steps 1 and 6.
Step 3 may be ``interruption`` or ``episodes`` instead; step 5 may wait for ``teacher``. ``partial_reports`` has what lost leases and
servers left unfinished; ``task_runtimes`` opens prompts, verifiers and environments. ``../registration`` has the heartbeats, and
watches the server, whose state ``../server_state`` keeps.

A weight update (one at a time); files without a folder are those of ``weights/``::

    trainer           actor                                                                   vLLM worker
    1 │── join ─────▶ weight_control     WeightControl.join()                                      │
      │               update_client      WeightUpdateClient.init_group() ─────▶ receiver_group     ReceiverGroup
    2 │── receive ──▶ weight_control     WeightControl.receive(): ServerState.begin_update()       │
      │               update_client      .install(): VllmClient.pause()                            │
      │                                  .update_weights() ───────────────────▶ vllm_weight_engine start_weight_update()
    3 │══ buckets over the group, or read by weight_files ════════════════════▶ vllm_weight_engine receive_weights()
    4 │                                  into the model's layers:               vllm_layers        ModelLayers.load()
      │                                  of adapters that are not merged:       vllm_lora_versions
    5 │◀─ received ── update_client      resume(), by the update_reports ◀───── vllm_weight_engine finish_weight_update()
    6 │── probe ────▶ weight_control     WeightControl.probe() ▶ VllmClient.prompt_logprobs() ────▶│

``weight_layout`` of ``scalerl_api`` has the place of each tensor in a bucket and its checksum. ``../vllm_worker`` has
the methods that the actor calls in a worker, ``../actor_api`` checks the token of these requests. ``adapters_in_flight`` has which
adapters a request samples with.

From a past response to a draft, with ``generator.speculation``; files are those of ``drafts/``::

    coordinator       actor                                                                   vLLM worker
    1 │── responses ▶ past_responses     PastResponseFeed.prepare() ──────────▶ vllm_proposer      HistoryProposer.remember()
    2 │                                  a step of the server:                  vllm_proposer      HistoryProposer.propose()
      │                                                                         draft_threshold    DraftThreshold.value()
      │                                                                         drafter            Drafter.propose()
    3 │◀─ groups ──── past_responses     PastResponseFeed.sampled() ◀────────── vllm_proposer      take_tally()

Processes::

    actor         ``actor``
    vLLM server   ``vllm_server`` starts it; ``server/`` has its options, environment, cache and failures
    vLLM worker   ``vllm_worker`` is the plug-in, and what the actor calls

vLLM is pinned; only modules named ``vllm_*`` depend on its internals. This package does not choose prompts (the
coordinator does), does not implement verifiers (``scalerl_tasks`` does), and does not import ``scalerl_trainer``.
"""
