"""AdamW's state of an optimizer, whatever its tensors are parts of."""

from __future__ import annotations

import torch


def moments(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of one of its tensors, which this creates with zeros before the first step."""
    state: dict[str, torch.Tensor] = optimizer.state[tensor]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor.data), torch.zeros_like(tensor.data)
    return state


def steps(optimizer: torch.optim.Optimizer) -> float:
    """The step count, which is equal for all tensors."""
    return max((float(state["step"]) for state in optimizer.state.values() if state), default=0.0)


def set_steps(optimizer: torch.optim.Optimizer, count: float) -> None:
    """Set the step count."""
    for state in optimizer.state.values():
        state["step"].fill_(count)


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Reset the moments and the step count to zero."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
