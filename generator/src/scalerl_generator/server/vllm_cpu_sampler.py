"""Fixes the rejection sampler of vLLM's CPU build (0.32), which verifies drafts at an undefined temperature.

The sampler repeats each sequence's temperature for its drafted tokens. The CPU build's replacement for that kernel writes to
an int64 copy and discards it. The temperatures are then uninitialized memory, and completions with drafts follow another
distribution. ``test_vllm_drafts_leave_the_law_of_outputs`` fails without this fix.
"""

from __future__ import annotations

import torch


def patch_cpu_sampler() -> None:
    """Replace the kernel before a worker registers it. Does nothing if vLLM does not run on CPUs."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = _expand


def _expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,  # vLLM passes arguments by these names
) -> None:
    """Write each sequence's value to ``output``, once for each of its drafted tokens.

    ``cu_num_tokens`` are the running sums of the numbers of drafted tokens.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(torch.repeat_interleave(values, counts))
