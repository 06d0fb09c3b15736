"""Advantages, aggregation weights, losses and mismatch statistics as pure functions of tensors.

The package has no I/O, ranks, models, tokenizers, DeepSpeed, clocks or randomness.

Shape suffixes, used in every module of this package:

===== ==========================================================================================
``_s`` one entry per sequence (a prompt with one of its completions) of the batch
``_n`` one entry per trainable token, flat: sequence after sequence, left to right
``_g`` one entry per group, that is, per prompt
===== ==========================================================================================

Tokens are flat because each token's weight includes the normalisation of the whole batch, so the losses and gradients of
any split of the tokens over micro-batches and ranks have the same sum. See ``aggregation``.
"""
