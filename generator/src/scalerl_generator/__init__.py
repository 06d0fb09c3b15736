"""Generates rollouts: the vLLM server of a run, its plug-ins, and the actor that drives it.

From a lease to a pushed group (``actor.run_actor()`` starts the loops)::

    coordinator       actor                                                        vLLM server
        │◀─ register ── Registration.run() ── heartbeats: Registration.progress()       │
        │               ServerMonitor.run() ─────────────────────────────── GET health ▶│
        │◀─ lease ───── Leasing.run(): groups_wanted() says how many                    │
        │── Leases ───▶ RolloutGenerator.generate()                                     │
        │                 PromptCodec.encode() ▶ ServerState.serving() ▶ sample_plain() │
        │                 CompletionStreams.extend() ▶ VllmClient.stream() POST generate▶│
        │                   PartialCompletion ◀─ token ids, log-probabilities, versions │
        │               RolloutGenerator.grade(): PromptCodec.texts(), version_spans()  │
        │◀─ groups ──── Delivery.put() ▶ Delivery.run()                                 │

From a past response to a draft, with ``generator.speculation``::

    coordinator       actor                                                        vLLM worker
        │◀─ responses ─ PastResponseFeed.prepare(): what the server does not remember     │
        │── groups ───▶   VllmClient.remember() ────────────────────────────────────────▶│ HistoryProposer.remember()
        │                                                                               │   Drafter.remember()
        │               a step of the server: HistoryProposer.propose() ▶ DraftThreshold.value() ▶ Drafter.propose()
        │◀─ groups ──── PastResponseFeed.sampled(): drafted and accepted tokens ◀────────│ take_tally()

A weight update (one at a time)::

    trainer           actor                                                        vLLM worker
        │── join ─────▶ WeightControl.join() ▶ ServerWeights.init_group() ─────────────▶│ init_transfer_engine()
        │── receive ──▶ WeightControl.receive(): ServerState.begin_update()             │
        │                 ServerWeights.receive(): pause(), update_weights() ──────────▶│ start_weight_update()
        │════ buckets over the process group ══════════════════════════════════════════▶│ receive_weights()
        │                   resume() ◀──────────────────────────────────────────────────│ finish_weight_update()
        │◀─ received ── ServerState.complete_update(), or fail_update()                 │
        │── probe ────▶ WeightControl.probe() ▶ VllmClient.prompt_logprobs() ──────────▶│

``actor_api`` checks the token of these requests and calls ``WeightControl``, which decides; ``ServerWeights`` calls the server.

Modules by the process that runs them::

    actor         ``actor`` starts the loops; ``registration``, ``server_state``, ``metrics``, ``coordinator_client``
                  ``leasing`` leases, ``concurrency`` limits sequences, ``delivery`` pushes
                  ``rollouts`` generates a group: ``completion_streams`` and ``partial_completion`` sample it, ``interruption``
                  and ``episodes`` in other ways; ``prompt_codec``, ``repetition``, ``teacher``
                  ``partial_reports``, ``kept_completions``: what lost leases and servers left unfinished
                  ``actor_api``, ``weight_control``, ``vllm_weights``: weight updates
                  ``past_responses`` for drafts
                  ``vllm_client``, ``vllm_replies``, ``adapter_versions``: requests to the server, and its replies
    vLLM server   ``vllm_server`` starts it; ``compile_cache``, ``vllm_failures``, ``vllm_lifetime``
    vLLM worker   ``vllm_worker`` receives weights: ``checksum``, ``weight_files``, ``merged_adapters``, ``vllm_adapters``
                  ``vllm_drafts`` drafts: ``drafter``, ``draft_threshold``, ``vllm_rejection_sampler``, ``vllm_cpu_sampler``
    several       ``draft_protocol`` of actor and worker, ``sampling_seed`` of server and worker

vLLM is pinned; only modules named ``vllm_*`` depend on its internals. This package does not choose prompts (the
coordinator does), does not implement verifiers (``scalerl_tasks`` does), and does not import ``scalerl_trainer``.
"""
