"""Speculation from past responses (``generator.speculation``): the actor's feed, and the proposer in vLLM's worker. The docstring of
:mod:`scalerl_generator` has the steps."""
