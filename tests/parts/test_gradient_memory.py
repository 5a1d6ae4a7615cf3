"""``GradBufferPool`` reuses memory that nothing else refers to, and never memory still in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from halfpeak.parts.grad_buffers import MIN_STANDALONE, GradBufferPool


def masters() -> list[Tensor]:
    """Small masters, whose gradients share memory, and large ones; two are not contiguous."""
    return [
        torch.ones(3),
        torch.ones(5, 7).T,
        torch.ones(()),
        torch.ones(0),
        torch.ones(2, 8, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(MIN_STANDALONE),
        torch.ones(2, MIN_STANDALONE),
    ]


def places(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_each_has_a_version_of_its_own() -> None:
    one, two = GradBufferPool().take([torch.ones(3), torch.ones(3)])
    before = two._version
    one.zero_()
    assert two._version == before


def itself(tensor: Tensor) -> Tensor:
    return tensor


def of_storage(storage: torch.UntypedStorage) -> Tensor:
    """The first three numbers: each master of the test is at the start of its memory."""
    return torch.empty(0).set_(storage, 0, (3,))


HOLDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "the tensor": (itself, itself),
    "a list": (lambda tensor: [tensor], lambda held: held[0]),
    "a view": (lambda tensor: tensor[:1], itself),
    "detached": (Tensor.detach, itself),
    "an alias": (lambda tensor: tensor.data, itself),
    "the storage": (Tensor.untyped_storage, of_storage),
    "an array": (Tensor.numpy, torch.from_numpy),
    "a capsule": (to_dlpack, from_dlpack),
    "a graph": (
        lambda tensor: torch.ones(tensor.shape, requires_grad=True) * tensor,
        lambda held: held.grad_fn._saved_other,
    ),
}
"""How somebody holds a tensor, and how the values are read through what is held."""


@pytest.mark.parametrize("index", [0, 5, 6])
@pytest.mark.parametrize(("hold", "read"), HOLDS.values(), ids=HOLDS)
def test_what_somebody_holds_is_not_given_again(
    hold: Callable[[Tensor], Any], read: Callable[[Any], Tensor], index: int
) -> None:
    memory, ours = GradBufferPool(), masters()
    held = hold(memory.take(ours)[index])
    before = places(memory.take(ours)[index : index + 1])
    del held
    again = memory.take(ours)
    again[index].fill_(3.0)
    held = hold(again[index])
    del again
    place = places(memory.take(ours)[index : index + 1])
    assert place != before
    memory.take(ours)[index].fill_(4.0)
    # What is held is not the memory that was written, and keeps its values.
    assert bool((read(held) == 3.0).all())


@pytest.mark.parametrize("index", [0, 5])
def test_what_was_sent_to_another_process_is_not_given_again(index: int) -> None:
    memory, ours = GradBufferPool(), masters()
    # As a torch.multiprocessing queue does: afterwards nothing in this process refers to the tensor.
    sent = places([memory.take(ours)[index].share_memory_()])
    again = memory.take(ours)
    assert not again[index].is_shared()
    assert places([again[index]]) != sent


def swapped(tensor: Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


def with_graph(tensor: Tensor) -> None:
    tensor.add_(torch.ones_like(tensor, requires_grad=True))


@pytest.mark.parametrize("index", [0, 6])
@pytest.mark.parametrize("spoil", [swapped, with_graph, Tensor.requires_grad_])
def test_a_tensor_that_somebody_has_made_something_else_of(
    spoil: Callable[[Tensor], Any], index: int
) -> None:
    memory, ours = GradBufferPool(), masters()
    spoil(memory.take(ours)[index])
    fresh = memory.take(ours)
    assert not any(tensor.requires_grad for tensor in fresh)
    assert len(set(places([tensor for tensor in fresh if tensor.numel()]))) == len(ours) - 1
    first = places(fresh)
    del fresh
    assert places(memory.take(ours)) == first
