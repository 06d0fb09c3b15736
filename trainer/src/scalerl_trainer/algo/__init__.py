"""The mathematics of an update: tensors in, tensors out.

What lives here: advantages, aggregation weights, losses, and the measures of mismatch between
trainer and generator. What never lives here: I/O, ranks, models, tokenizers, DeepSpeed, clocks, randomness.

Shape suffixes, used in every module of this package:

===== ==========================================================================================
``_s`` one entry per sequence (a prompt with one of its completions) of the batch
``_n`` one entry per trainable token, flat: sequence after sequence, left to right
``_g`` one entry per group, that is, per prompt
===== ==========================================================================================

Why flat: with a weight per token that already holds the whole batch's normalisation, any split of the tokens
over micro-batches and ranks adds up to the same loss and the same gradient. See ``aggregation``.
"""
