"""How the elements of a tensor lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gap or overlap, in whatever order.

    >>> import torch
    >>> is_dense(torch.ones(2, 3).T), is_dense(torch.ones(2, 3)[:, :2])
    (True, False)
    """
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def as_vector(tensor: Tensor) -> Tensor | None:
    """The memory of a plain dense tensor as a vector, in the order in which it lies; None for any other.

    >>> import torch
    >>> as_vector(torch.tensor([[1, 2], [3, 4]]).T)
    tensor([1, 2, 3, 4])
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not is_dense(tensor):
        return None
    return tensor.detach().as_strided((tensor.numel(),), (1,))
