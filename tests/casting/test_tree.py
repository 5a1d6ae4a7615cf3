"""``cast_tree``: containers keep their types, and one without a tensor to cast stays the same object."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from halfpeak.casting.tree import cast_tree

LOW = torch.bfloat16


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (2,))


Pair = namedtuple("Pair", "left right")  # the untyped kind too


class Output(OrderedDict[str, Any]):
    """A dict whose items are also attributes, as model libraries return."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__.update(items)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


@dataclass
class Plain:
    values: Tensor
    extra: dict[str, Any] = field(default_factory=dict)
    hidden: Any = field(default=None, init=False)


@dataclass(frozen=True)
class Frozen:
    values: Tensor
    name: str = "n"


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    values: Tensor
    name: str = "n"

    def __post_init__(self) -> None:
        assert self.name, "an invariant of its own"


class Batch:
    """Has a ``to`` that casts."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.values.to(dtype))


class DeviceOnly:
    """Has a ``to`` that knows devices only."""

    def __init__(self) -> None:
        self.values = x()

    def to(self, *, device: str) -> DeviceOnly:
        raise AssertionError(device)


class BatchDict(UserDict[str, Any]):
    """A mapping with a ``to`` that casts, as tokenizers return."""

    def to(self, dtype: torch.dtype) -> BatchDict:
        return BatchDict({key: value.to(dtype) for key, value in self.items()})


def leaves(value: Any) -> list[Tensor]:
    """Every tensor inside ``value``, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, Mapping):
        found = [leaf for item in value.values() for leaf in leaves(item)]
        return found + (
            [leaf for item in vars(value).values() for leaf in leaves(item)]
            if isinstance(value, Output)
            else []
        )
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [leaf for item in value for leaf in leaves(item)]
    names = [*getattr(value, "__dataclass_fields__", ()), *getattr(value, "__dict__", ())]
    return [leaf for name in dict.fromkeys(names) for leaf in leaves(getattr(value, name))]


HOLDERS: dict[str, Callable[[], Any]] = {
    "tensor": x,
    "parameter": lambda: nn.Parameter(x()),
    "list": lambda: [x(), x()],
    "tuple": lambda: (x(), 1),
    "set": lambda: {x(), "a"},
    "frozenset": lambda: frozenset([x()]),
    "deque": lambda: deque([x(), x()], maxlen=5),
    "namedtuple": lambda: Pair(x(), 3),
    "return type": lambda: torch.max(x(2, 3), dim=1),
    "dict": lambda: {"a": x(), 3: 3, None: None},
    "OrderedDict": lambda: OrderedDict(b=x(), a=x()),
    "defaultdict": lambda: defaultdict(list, {"a": x(), "b": [x()]}),
    "mappingproxy": lambda: types.MappingProxyType({"a": x()}),
    "model output": lambda: Output(loss=x(), logits=(x(), x()), none=None),
    "mapping with to": lambda: BatchDict(a=x()),
    "dataclass": lambda: Plain(x(), {"more": [x()]}),
    "frozen dataclass": lambda: Frozen(x()),
    "frozen slotted dataclass": lambda: FrozenSlotted(x()),
    "batch with to": lambda: Batch(x()),
    "PackedSequence": lambda: pack_padded_sequence(x(3, 2, 4), [3, 1]),
    "nested": lambda: {"a": [Pair(x(), (Frozen(x()),)), Output(y=[x()])], "b": deque([{"c": x()}])},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", HOLDERS)
def test_every_tensor_is_cast_and_every_type_kept(name: str, dtype: torch.dtype) -> None:
    value = HOLDERS[name]()
    before = [(leaf, leaf.clone()) for leaf in leaves(value)]
    cast = cast_tree(value, dtype)
    assert type(cast) is (Tensor if name == "parameter" else type(value))
    found = leaves(cast)
    assert len(found) == len(before) > 0
    key = Tensor.tolist
    real = [leaf for leaf in found if leaf.is_floating_point()]
    assert real
    assert {leaf.dtype for leaf in real} == {dtype}
    wanted = [was.to(dtype) for _, was in before if was.is_floating_point()]
    assert sorted(map(key, real)) == sorted(map(key, wanted))
    assert all(torch.equal(leaf, was) and leaf.dtype is was.dtype for leaf, was in before), (
        "the argument is untouched"
    )


@pytest.mark.parametrize("name", HOLDERS)
def test_what_is_cast_already_stays_the_same_object(name: str) -> None:
    value = HOLDERS[name]()
    cast = cast_tree(value, torch.float32)
    if name not in ("batch with to", "mapping with to"):
        assert cast is value
    assert all(now is then for now, then in zip(leaves(cast), leaves(value), strict=True))


def test_what_a_container_keeps_besides_is_kept() -> None:
    assert cast_tree(deque([x()], maxlen=5), LOW).maxlen == 5
    factory = cast_tree(defaultdict(list, a=x()), LOW)
    assert factory["new"] == []
    assert list(cast_tree(OrderedDict(b=x(), a=x()), LOW)) == ["b", "a"]
    output = cast_tree(Output(loss=x(), logits=(x(),)), LOW)
    assert output.loss is output["loss"]
    assert list(output) == ["loss", "logits"]
    plain = Plain(x())
    plain.hidden = [x()]
    assert cast_tree(plain, LOW).hidden[0].dtype is LOW


def test_one_shared_container_of_caller_and_callee() -> None:
    """While nothing in it needs a cast, the model gets the caller's own cache, which it fills."""
    cache: dict[str, Any] = {"step": 3, "keys": [], "seen": torch.tensor([1, 2])}
    assert cast_tree(cache, LOW) is cache
    assert cast_tree([cache], LOW)[0] is cache
    assert cast_tree({"x": x(), "cache": cache}, LOW)["cache"] is cache


def numbers() -> Iterator[Tensor]:
    yield x()


UNTOUCHED: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "float": lambda: 1.5,
    "bytearray": lambda: bytearray(b"text"),
    "generator": numbers,
    "array": lambda: np.ones(3, dtype=np.float32),
    "size": lambda: torch.Size([1, 2]),
    "dtype": lambda: torch.float32,
    "module": lambda: nn.Linear(2, 2),
    "class with to": lambda: Batch,
    "dataclass class": lambda: Plain,
    "int tensor": lambda: torch.arange(3),
    "complex tensor": lambda: torch.randn(2, dtype=torch.complex64),
    "empty list": list,
    "to for devices only": DeviceOnly,
    "nested": lambda: {"a": [1, (2, torch.arange(2))], "b": Frozen(torch.arange(2))},
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_everything_else_passes_through(name: str) -> None:
    value = UNTOUCHED[name]()
    assert cast_tree(value, LOW) is value


def test_casts_are_differentiable() -> None:
    leaf = torch.ones(2, requires_grad=True)
    cast = cast_tree({"a": Pair(leaf, FrozenSlotted(leaf))}, LOW)
    (cast["a"].left.sum() * 2 + cast["a"].right.values.sum()).backward()
    assert leaf.grad is not None
    assert (leaf.grad.dtype, leaf.grad.tolist()) == (torch.float32, [3.0, 3.0])


def test_strides_and_sparseness_are_kept() -> None:
    image = x(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert cast_tree(image, LOW).is_contiguous(memory_format=torch.channels_last)
    sparse = torch.eye(3).to_sparse()
    assert cast_tree(sparse, LOW).is_sparse


def test_errors_of_a_custom_batch_are_not_hidden() -> None:
    class Broken(Batch):
        def to(self, dtype: torch.dtype) -> Batch:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        cast_tree([Broken(x())], LOW)


@dataclass
class Sample:
    """Has a ``to`` that would also cast the labels."""

    x: Any
    label: Any

    def to(self, dtype: torch.dtype) -> Sample:
        return Sample(self.x.to(dtype), self.label.to(dtype))


def labelled(kind: str) -> tuple[Any, Callable[[Any], tuple[Tensor, Tensor]]]:
    """A batch of another library's type, and a function that reads its numbers and labels."""
    x, label = torch.ones(2), torch.tensor([1, 2])
    if kind == "BatchEncoding":
        return pytest.importorskip("transformers").BatchEncoding({"x": x, "label": label}), lambda b: (
            b["x"],
            b["label"],
        )
    if kind == "dataclass":
        return Sample(x, label), lambda b: (b.x, b.label)
    structures = pytest.importorskip("mmengine.structures")
    inner = structures.BaseDataElement(x=x, label=label, metainfo={"path": "a.png"})
    if kind == "BaseDataElement":
        return inner, lambda b: (b.x, b.label)
    if kind == "InstanceData":
        return structures.InstanceData(x=x, label=label), lambda b: (b.x, b.label)
    return [structures.BaseDataElement(inner=inner)], lambda b: (b[0].inner.x, b[0].inner.label)


@pytest.mark.parametrize("kind", ["BatchEncoding", "dataclass", "BaseDataElement", "InstanceData", "nested"])
def test_labels_in_batches_of_other_libraries_stay_integers(kind: str) -> None:
    batch, read = labelled(kind)
    cast = cast_tree(batch, torch.float16)
    assert type(cast) is type(batch)
    assert [one.dtype for one in read(cast)] == [torch.float16, torch.int64]
    assert [one.dtype for one in read(batch)] == [torch.float32, torch.int64]
    assert cast_tree(cast, torch.float16) is cast
    if kind == "BaseDataElement":
        assert cast.path == "a.png"
