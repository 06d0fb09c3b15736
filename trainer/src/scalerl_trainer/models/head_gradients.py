"""Gradients of the output head, summed over chunks of positions. Shapes: those of :mod:`.head`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


class Gradients:
    """Gradients by hidden states, weight and bias.

    Float32 for every model dtype where a gradient is a sum over chunks. None of frozen parameters (LoRA).

    Args:
        needed: whether those are needed.
    """

    def __init__(
        self,
        needed: Sequence[bool],
        hidden_md: torch.Tensor,
        weight_vd: torch.Tensor,
        bias_v: torch.Tensor | None,
    ) -> None:
        self._hidden_md = torch.empty_like(hidden_md)
        self._dtype = weight_vd.dtype
        self._weight_vd = torch.zeros_like(weight_vd, dtype=torch.float32) if needed[1] else None
        self._bias_v = None
        if bias_v is not None and needed[2]:
            self._bias_v = torch.zeros_like(bias_v, dtype=torch.float32)

    def add(
        self, part: slice, delta: Delta, states_cd: torch.Tensor, matrix_vd: torch.Tensor, fp32: bool
    ) -> None:
        """Those of a chunk."""
        self._hidden_md[part] = delta.by_states(matrix_vd, fp32).to(self._hidden_md.dtype)
        if self._bias_v is not None:
            delta.add_to_bias(self._bias_v)
        if self._weight_vd is not None:
            delta.add_to_weight(self._weight_vd, states_cd, fp32)

    def finished(self) -> tuple[torch.Tensor | None, ...]:
        """All three, in the dtypes of what they are by."""
        sums = (self._weight_vd, self._bias_v)
        return self._hidden_md, *(None if one is None else one.to(self._dtype) for one in sums)


@dataclass(frozen=True, slots=True)
class Delta:
    """The derivative by a chunk's raw logits: ``sign · values``, and elements apart."""

    values_cv: torch.Tensor
    """In the dtype of the operands."""
    sign_c: torch.Tensor | None = None
    """1 or -1; None for 1."""
    apart: tuple[torch.Tensor, torch.Tensor] | None = None
    """Indices and float32 values ``[C, K]`` of the elements that ``values_cv`` has not."""

    def by_states(self, matrix_vd: torch.Tensor, fp32: bool) -> torch.Tensor:
        grad_cd = product(self.values_cv, matrix_vd, fp32)
        if self.sign_c is not None and self.apart is not None:
            grad_cd.mul_(self.sign_c[:, None])
            for index_c, value_c in zip(*(x.unbind(1) for x in self.apart), strict=True):
                grad_cd.addcmul_(matrix_vd[index_c].float(), value_c[:, None])
        return grad_cd

    def add_to_weight(self, grad_vd: torch.Tensor, states_cd: torch.Tensor, fp32: bool) -> None:
        operand_cd = states_cd.to(self.values_cv.dtype)
        if self.sign_c is None or self.apart is None:
            _add_product(grad_vd, self.values_cv.t(), operand_cd, fp32)
            return
        signed_cd = operand_cd * self.sign_c[:, None].to(operand_cd.dtype)
        _add_product(grad_vd, self.values_cv.t(), signed_cd, fp32)
        for index_c, value_c in zip(*(x.unbind(1) for x in self.apart), strict=True):
            grad_vd.index_add_(0, index_c, states_cd.float().mul_(value_c[:, None]))

    def add_to_bias(self, grad_v: torch.Tensor) -> None:
        if self.sign_c is None or self.apart is None:
            grad_v += self.values_cv.float().sum(0)
            return
        signs_c1 = self.sign_c[:, None].to(self.values_cv.dtype)
        grad_v += product(self.values_cv.t(), signs_c1, True).squeeze(1)
        grad_v.index_add_(0, self.apart[0].flatten(), self.apart[1].flatten())


def product(left: torch.Tensor, right: torch.Tensor, fp32: bool) -> torch.Tensor:
    """The matrix product of two tensors of one dtype, float32 with ``fp32``."""
    if fp32 and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, fp32: bool) -> None:
    """Add the product to the float32 ``total``, in place."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif fp32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:  # a product that is rounded to bfloat16 cannot be added to float32 by the same call
        total += left @ right
