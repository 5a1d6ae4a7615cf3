"""Trace a forward and backward pass as ordered events: inputs, weights and outputs of module calls, and gradients.

The model is not changed. Forward hooks read inputs and outputs. Hooks on the nodes of autograd's graph read every
single gradient before gradients of several uses are summed. A node belongs to the innermost call that made it, found by
autograd's sequence numbers.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from halfpeak.casting.suspend import disable_casts
from halfpeak.casting.tree import map_tree

Kind = Literal["input", "weight", "buffer", "output", "grad_output", "grad_input", "loss"]
"""The role of the tensor of an event. A parameter that is not trained counts as a buffer."""

MASKS: Final = ("input", "output", "buffer")
"""The kinds of events that may be masks, and that a replay can replace."""


class Key(NamedTuple):
    """The name of one tensor of a run, equal in runs of other precisions.

    Attributes:
        module: qualified name; empty outside of every call.
        call: the number of earlier calls of this module.
        tensor: such as ``"output[0]"``.
    """

    module: str
    call: int
    tensor: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a tensor; ``nan``, ``posinf`` and ``neginf`` say whether any element is such.

    Attributes:
        dtype: such as ``"float16"``.
        smallest: magnitude among finite nonzero elements; 0 if there are none.
        largest: magnitude among finite elements.
        zeros: share of elements that are zero.
    """

    dtype: str
    shape: tuple[int, ...]
    smallest: float
    largest: float
    zeros: float
    nan: bool
    posinf: bool
    neginf: bool

    @property
    def is_finite(self) -> bool:
        """Whether every element is finite."""
        return not (self.nan or self.posinf or self.neginf)


@dataclass(slots=True)
class Call:
    """One call of a module.

    Attributes:
        kind: name of the module's class.
        number: the number of earlier calls of this module.
        parent: the call around it, or None.
        first: autograd's sequence number at its beginning.
        last: autograd's sequence number at its end; None while it runs, or if it raised.
        recomputed: whether activation checkpointing ran it again in the backward pass.
    """

    module: str
    kind: str
    number: int
    parent: Call | None
    first: int
    thread: int
    recomputed: bool
    last: int | None = None


@dataclass(slots=True)
class Event:
    """One tensor, seen at one point of the run.

    Attributes:
        call: the call around it; None outside of every call.
        data: address and version of the tensor, to recognise it as input of another module.
        operation: the derivative that made a gradient, such as ``"Sqrt"``.
        summary: statistics of the tensor, filled in after the run.
    """

    kind: Kind
    key: Key
    call: Call | None
    data: tuple[int, int] = (0, 0)
    operation: str = ""
    summary: Summary | None = None

    @property
    def is_finite(self) -> bool:
        """Whether every element is finite; True without a summary."""
        return self.summary is None or self.summary.is_finite

    @property
    def is_mask_like(self) -> bool:
        """Whether it may be a mask that is added to scores: no weight, and all that is non-finite is minus infinity."""
        found = self.summary
        only_neginf = found is not None and found.neginf and not (found.nan or found.posinf)
        return only_neginf and self.kind in MASKS

    @property
    def is_gradient(self) -> bool:
        """Whether it is a gradient inside the graph."""
        return self.kind in ("grad_output", "grad_input")


@dataclass(slots=True)
class Trace:
    """The record of one run.

    Attributes:
        events: in order of time.
        calls: in the order in which they began.
        loss: the event of the loss; None if the closure raised.
        grads_finite: whether all gradients of weights are finite; None without a backward pass.
    """

    events: list[Event] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    loss: Event | None = None
    grads_finite: bool | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the loss, all gradients of weights and all trained weights are finite."""
        return self.is_step_finite and not self.bad_weights

    @property
    def is_step_finite(self) -> bool:
        """Whether the loss and all gradients of weights are finite."""
        return self.loss is not None and self.loss.is_finite and self.grads_finite is not False

    @property
    def bad_weights(self) -> list[Event]:
        """The events of trained weights that are not finite."""
        return [event for event in self.events if event.kind == "weight" and not event.is_finite]

    def find(self, key: Key) -> list[Event]:
        """The events with that key: one of a forward pass, several of gradients that are summed."""
        return [event for event in self.events if event.key == key]

    def gradients_of(self, module: str, call: int) -> list[Event]:
        """The events of gradients inside one call."""
        return [e for e in self.events if e.is_gradient and e.key[:2] == (module, call)]


Replace = Callable[[Key, Tensor], Tensor]
"""Returns the tensor to use in place of an input, output or buffer of a module."""


class Tracer:
    """Records a :class:`Trace`.

    Args:
        models: the models to trace.
        replace: called with every input, output and buffer of every module, and buffers are overwritten; None replaces
            nothing.
    """

    def __init__(self, models: Sequence[nn.Module], *, replace: Replace | None) -> None:
        self.trace = Trace()
        self._models = models
        # All names of every module, by id; that of the model itself is empty.
        self._names: dict[int, list[str]] = {}
        for name, module in _named_modules(models):
            self._names.setdefault(id(module), []).append(name)
        self._replace = replace
        self._stack: list[Call] = []
        self._counts: dict[tuple[str, bool], int] = {}
        self._flags: list[tuple[Event, Tensor, torch.dtype, tuple[int, ...]]] = []
        self._nodes: set[Node] = set()
        self._in_backward = False
        self._weights = _weights_of(models)
        self._owners = {id(weight): (name, attribute) for name, attribute, weight in self._weights}
        self._checked: set[int] = set()
        if replace is not None:
            self._replace_buffers(replace)

    @contextmanager
    def watching(self) -> Generator[None]:
        """Register hooks on every module for the time of the body."""
        modules = {id(module): module for model in self._models for module in model.modules()}
        with ExitStack() as stack:
            for module in modules.values():
                for handle in (
                    module.register_forward_pre_hook(self._before, with_kwargs=True),
                    module.register_forward_hook(self._after, with_kwargs=True),
                ):
                    stack.callback(handle.remove)
            yield

    def backward(self, scaled: Tensor) -> None:
        """Run the backward pass of a scaled loss and record every gradient."""
        if not scaled.requires_grad:
            return
        self._in_backward = True
        self._hook_nodes([scaled])
        scaled.backward()
        bad = [one for one in self._weights if one[2].grad is not None and not _all_finite(one[2].grad)]
        for name, attribute, weight in bad:
            assert weight.grad is not None
            self._see("grad_input", Key(name, 0, f"{attribute}.grad"), None, weight.grad)
        self.trace.grads_finite = not bad

    def see_loss(self, loss: Tensor) -> None:
        """Record the loss that the closure returned, and the weights of modules that were not called."""
        for owner, attribute, weight in self._weights:
            if id(weight) not in self._checked:
                self._see_weight(owner, attribute, weight, None)
        self.trace.loss = self._see("loss", Key("", 0, "loss"), None, loss)

    def finish(self) -> Trace:
        """Read the statistics into the events and return the trace. Waits for the device."""
        for event, packed, dtype, shape in self._flags:
            smallest, largest, zeros, nan, posinf, neginf = packed.tolist()
            event.summary = Summary(
                str(dtype).removeprefix("torch."),
                shape,
                smallest,
                largest,
                zeros,
                nan > 0,
                posinf > 0,
                neginf > 0,
            )
        self._flags.clear()
        self._nodes.clear()
        return self.trace

    # Forward.

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = self._names[id(module)]
        # If a module has several names, its name inside the calling module is used.
        parent = self._stack[-1] if self._stack else None
        name = next((n for n in names if parent is not None and n.startswith(f"{parent.module}.")), names[0])
        number = self._counts.get((name, self._in_backward), 0)
        self._counts[name, self._in_backward] = number + 1
        thread, first = threading.get_ident(), torch.autograd._get_sequence_nr()
        call = Call(name, type(module).__name__, number, parent, first, thread, self._in_backward)
        self._stack.append(call)
        if self._in_backward:
            return None
        self.trace.calls.append(call)
        inputs = [*_named(args, "input"), *_named(kwargs, "input")]
        for tensor_name, tensor in inputs:
            self._see("input", Key(name, number, tensor_name), call, tensor)
        for owner, attribute, weight in self._weights:
            if owner == name and id(weight) not in self._checked:
                self._see_weight(owner, attribute, weight, call)
        if self._replace is None:
            return None
        keys = {id(tensor): Key(name, number, tensor_name) for tensor_name, tensor in inputs}
        return self._replaced(args, keys), self._replaced(kwargs, keys)

    def _replace_buffers(self, replace: Replace) -> None:
        for owner, attribute, tensor in self._weights:
            if _kind_of(tensor) == "buffer" and type(tensor) in (Tensor, nn.Parameter):
                with torch.no_grad():
                    tensor.copy_(replace(Key(owner, 0, attribute), tensor))

    def _replaced(self, value: Any, keys: Mapping[int, Key]) -> Any:
        replace = self._replace
        assert replace is not None
        return map_tree(value, lambda leaf: replace(keys[id(leaf)], leaf) if id(leaf) in keys else leaf)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # Calls that raised, and checkpoints that stopped early, are still on the stack.
        while self._stack and self._stack[-1].module not in self._names[id(module)]:
            self._stack.pop()
        if not self._stack:
            return None
        call = self._stack.pop()
        call.last = torch.autograd._get_sequence_nr()
        outputs = list(_named(output, "output[0]" if isinstance(output, Tensor) else "output"))
        if self._in_backward:
            # A block of a reentrant checkpoint: its graph exists only from here until its own backward pass.
            self.trace.calls.append(call)
            if not self._stack:
                self._hook_nodes([tensor for _, tensor in outputs])
            return None
        for owner, attribute, weight in self._weights:
            # A weight whose own module was never called, such as the output projection inside an attention.
            if id(weight) not in self._checked and owner.startswith(f"{call.module}." if call.module else ""):
                self._see_weight(owner, attribute, weight, call)
        keys = {id(tensor): Key(call.module, call.number, name) for name, tensor in outputs}
        for _, tensor in outputs:
            self._see("output", keys[id(tensor)], call, tensor)
        return None if self._replace is None else self._replaced(output, keys)

    def _see_weight(self, owner: str, attribute: str, weight: Tensor, call: Call | None) -> None:
        self._checked.add(id(weight))
        self._see(_kind_of(weight), Key(owner, 0, attribute), call, weight)

    def _see(self, kind: Kind, key: Key, call: Call | None, tensor: Tensor, operation: str = "") -> Event:
        event = Event(kind, key, call, _data(tensor), operation)
        self.trace.events.append(event)
        packed = _packed(tensor)
        if packed is not None:
            self._flags.append((event, packed, tensor.dtype, tuple(tensor.shape)))
        return event

    # Backward.

    def _hook_nodes(self, tensors: Sequence[Tensor]) -> None:
        """Record the incoming and outgoing gradients of every node of the graph behind ``tensors``."""
        thread, recomputed = threading.get_ident(), bool(self._nodes)
        calls = [c for c in self.trace.calls if c.thread == thread and c.recomputed == recomputed]
        waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in self._nodes:
                continue
            self._nodes.add(node)
            waiting += [after for after, _ in node.next_functions if after is not None]
            node.register_hook(self._looks_at(node, calls))

    def _looks_at(self, node: Any, calls: list[Call]) -> Callable[[Any, Any], None]:
        variable = getattr(node, "variable", None)
        operation = node.name().removesuffix("0").removesuffix("Backward")
        if isinstance(variable, Tensor):
            name, attribute = self._owners.get(id(variable), ("", "grad"))
            key, call = Key(name, 0, f"{attribute}.grad"), None
            names: list[str] = []
        else:
            number = node._sequence_nr()
            call = _innermost(calls, number)
            module, count = ("", 0) if call is None else (call.module, call.number)
            to = self._gradient_name(node, call, 0) if operation in _REARRANGING else ""
            key = Key(module, count, to if to.endswith(".grad") else "grad_output[0]")
            names = [self._gradient_name(after, call, i) for i, (after, _) in enumerate(node.next_functions)]

        def look(made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
            with torch.no_grad(), disable_casts():
                for grad in given:
                    if grad is not None:
                        self._see("grad_output", key, call, grad, operation)
                for name, grad in zip(names, made, strict=False):
                    if grad is not None:
                        self._see("grad_input", key._replace(tensor=name), call, grad, operation)

        return look

    def _gradient_name(self, node: Any, call: Call | None, index: int) -> str:
        """The name of the gradient that goes to a node: of a weight, or of an input."""
        for _ in range(8):  # A weight may be transposed, cast and viewed on the way.
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor):
                return f"{self._owners.get(id(variable), ('', 'input'))[1]}.grad"
            if (
                node is None
                or len(node.next_functions) != 1
                or call is None
                or node._sequence_nr() < call.first
            ):
                break
            node = node.next_functions[0][0]
        return f"grad_input[{index}]"


_REARRANGING: Final = frozenset({"T", "Transpose", "Permute", "View", "ToCopy"})
"""Operations on a weight before its use. The gradient that they receive counts as the weight's."""


def _kind_of(weight: Tensor) -> Literal["weight", "buffer"]:
    return "weight" if weight.requires_grad else "buffer"


def _weights_of(models: Sequence[nn.Module]) -> list[tuple[str, str, Tensor]]:
    """(module, attribute, tensor) of every parameter and floating-point buffer, each once."""
    found: dict[int, tuple[str, str, Tensor]] = {}
    for name, module in _named_modules(models):
        for attribute, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            if tensor.is_floating_point():
                found.setdefault(id(tensor), (name, attribute, tensor))
    return list(found.values())


def _named_modules(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module with each of its names, which begin with the number of the model if there are several models."""
    for number, model in enumerate(models):
        prefix = "" if len(models) == 1 else f"model {number}: "
        for name, module in model.named_modules(remove_duplicate=False):
            yield prefix + name, module


def _named(value: Any, what: str) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors in a value, with names such as ``output[0]``, ``output['logits']``, ``output.loss``."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield what, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{what}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _named(item, f"{what}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _named(getattr(value, part.name, None), f"{what}.{part.name}")


def _innermost(calls: Sequence[Call], number: int) -> Call | None:
    """The call during which autograd gave out a sequence number; if calls are nested, the innermost."""
    inside = [c for c in calls if c.first <= number and (c.last is None or number < c.last)]
    return inside[-1] if inside else None


def _data(tensor: Tensor) -> tuple[int, int]:
    try:
        return tensor.data_ptr(), tensor._version
    except RuntimeError:  # The tensor has no storage, or was made in inference mode.
        return id(tensor), 0


def _packed(tensor: Tensor) -> Tensor | None:
    """The numbers of a :class:`Summary` as one tensor on the device; None if no element can be read.  # f64[6]"""
    if tensor.layout is not torch.strided:
        if not tensor.is_sparse:
            return None
        tensor = tensor.coalesce().values()
    if tensor.numel() == 0 or tensor.is_meta:
        return None
    with torch.no_grad(), disable_casts():
        value = tensor.detach()
        value = torch.view_as_real(value) if value.is_complex() else value
        value = value if value.dtype is torch.float64 else value.float()
        size = value.abs()
        finite = size.isfinite()
        largest = torch.where(finite, size, 0.0).amax()
        smallest = torch.where(finite & (size > 0), size, torch.inf).amin()
        smallest = torch.where(smallest.isfinite(), smallest, 0.0)
        parts = [
            smallest,
            largest,
            (size == 0).double().mean(),
            value.isnan().any(),
            (value == torch.inf).any(),
            (value == -torch.inf).any(),
        ]
        return torch.stack([part.double() for part in parts])


def _all_finite(tensor: Tensor) -> bool:
    packed = _packed(tensor)
    return packed is None or not bool(packed[3:].any())
