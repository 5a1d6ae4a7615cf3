"""``TensorVersions`` detects every write except an in-place write through ``.data``."""

from __future__ import annotations

import torch
from torch import Tensor

from halfpeak.ops.versions import TensorVersions


def recorded(*tensors: Tensor) -> TensorVersions:
    versions = TensorVersions()
    versions.record(tensors)
    return versions


def test_other_memory_at_the_same_address_is_noticed_once() -> None:
    memory = bytearray(16)
    tensors = [torch.ones(4), torch.ones(3)]
    tensors[0].data = torch.frombuffer(memory, dtype=torch.float32)
    versions = recorded(*tensors)
    before = tensors[0]._version, tensors[0].data_ptr()
    tensors[0].data = torch.frombuffer(memory, dtype=torch.float32)
    assert (tensors[0]._version, tensors[0].data_ptr()) == before
    assert not versions.unchanged(tensors)
    assert [versions.unchanged_one(i, tensor) for i, tensor in enumerate(tensors)] == [False, True]
    versions.record(tensors)
    assert versions.unchanged(tensors)


def test_a_write_in_place_and_another_address_are_noticed() -> None:
    tensors = [torch.ones(4), torch.ones(4)]
    versions = recorded(*tensors)
    tensors[0].add_(1)
    tensors[1].data = torch.zeros(4)
    assert not any(versions.unchanged_one(i, tensor) for i, tensor in enumerate(tensors))
    for index, tensor in enumerate(tensors):
        versions.record_one(index, tensor)
    assert versions.unchanged(tensors)


def test_another_number_of_tensors_is_a_change_and_can_be_recorded() -> None:
    first, second = torch.ones(2), torch.ones(2)
    versions = recorded(first)
    assert not versions.unchanged([first, second])
    versions.add(second)
    assert not versions.unchanged([first, second])
    versions.record([first, second])
    assert versions.unchanged([first, second])
