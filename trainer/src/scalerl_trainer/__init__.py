"""The trainer: rollouts in, better weights out.

What lives here
    ``algo``      losses, advantages, aggregation, masks, filters, mismatch: pure functions of tensors
    ``packing``   sequences to rows and micro-batches, and back to one flat order of tokens
    ``models``    a policy from the hub, from a folder, or from scratch; its head; its size in bytes
    ``engine``    the update itself; the one place that imports DeepSpeed
    ``sft``       supervised warm start through the same engine
    ``errors``    everything that this package raises on purpose

What never lives here
    Choosing prompts, grading, staleness rules (the coordinator's); sampling (the generator's); anything of
    Kubernetes; vLLM. ``algo`` does no I/O, knows no rank and no clock.

This module imports nothing, so that naming the package costs nothing (torch and DeepSpeed take seconds).
"""
