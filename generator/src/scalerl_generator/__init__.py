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

vLLM is pinned; only modules named ``vllm_*`` depend on its internals. This package does not choose prompts (the
coordinator does), does not implement verifiers (``scalerl_tasks`` does), and does not import ``scalerl_trainer``.
"""
