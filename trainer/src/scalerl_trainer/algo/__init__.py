"""Advantages, aggregation weights, losses and mismatch statistics: pure functions of tensors.

No I/O, ranks, models, tokenizers, DeepSpeed, clocks or randomness.

Shape suffixes, used in every module of this package:

===== ==========================================================================================
``_s`` one entry per sequence (a prompt with one of its completions) of the batch
``_n`` one entry per trainable token, flat: sequence after sequence, left to right
``_g`` one entry per group, that is, per prompt
===== ==========================================================================================

Why flat: each token's weight includes the normalisation of the whole batch, so any split of the tokens over
micro-batches and ranks adds up to the same loss and the same gradient. See ``aggregation``.
"""
