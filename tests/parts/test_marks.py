"""What is noted of tensors, and what is noticed."""

from __future__ import annotations

import torch
from torch import Tensor

from halfpeak.parts.marks import Marks


def marked(*tensors: Tensor) -> Marks:
    marks = Marks()
    for tensor in tensors:
        marks.add(tensor)
    marks.note(tensors)
    return marks


def test_other_memory_at_the_same_address_is_noticed_once() -> None:
    room = bytearray(16)
    tensors = [torch.ones(4), torch.ones(3)]
    tensors[0].data = torch.frombuffer(room, dtype=torch.float32)
    marks = marked(*tensors)
    before = tensors[0]._version, tensors[0].data_ptr()
    tensors[0].data = torch.frombuffer(room, dtype=torch.float32)
    assert (tensors[0]._version, tensors[0].data_ptr()) == before
    assert not marks.agree(tensors)
    assert [marks.agrees(i, tensor) for i, tensor in enumerate(tensors)] == [False, True]
    marks.note(tensors)
    assert marks.agree(tensors)


def test_a_write_in_place_and_another_place_are_noticed() -> None:
    tensors = [torch.ones(4), torch.ones(4)]
    marks = marked(*tensors)
    tensors[0].add_(1)
    tensors[1].data = torch.zeros(4)
    assert not any(marks.agrees(i, tensor) for i, tensor in enumerate(tensors))
    for index, tensor in enumerate(tensors):
        marks.note_one(index, tensor)
    assert marks.agree(tensors)


def test_what_was_never_noted_agrees_with_nothing() -> None:
    marks, tensor = Marks(), torch.ones(2)
    marks.add(tensor)
    assert not marks.is_seen(0)
    assert not marks.agree([tensor])
