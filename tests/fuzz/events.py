"""The events that can happen to a run between and inside its steps. Each event is written once, for both sides.

An event is a function of a run (:class:`fuzz.subject.Subject` or :class:`fuzz.reference.Reference`) and a random
generator. It returns a run that replaces the given one, or None.
"""

from __future__ import annotations

import copy
import io
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from fuzz.config import Config, Planned
from fuzz.models import batch

Run = Any
Act = Callable[[Run, random.Random], Any]


class Injected(RuntimeError):
    """Raised by an event in the middle of something.

    Attributes:
        is_late: whether an optimizer had ended its own code.
        zeroes: whether the caller that catches it calls ``zero_grad()`` before the next batch.
    """

    def __init__(self, *, is_late: bool = False, zeroes: bool = False) -> None:
        super().__init__()
        self.is_late, self.zeroes = is_late, zeroes


class NextIteration(Exception):
    """A loop goes on with the next batch."""


BEFORE, FORWARDED, BETWEEN, AFTER = "before forward", "before backward", "before step", "after step"
ANY = (BEFORE, FORWARDED, BETWEEN, AFTER)
OUTSIDE = (BEFORE, AFTER)


@dataclass(frozen=True)
class Event:
    """One kind of event.

    Attributes:
        act: what happens.
        moments: when it may happen.
        refusals: parts of messages with which halfpeak may refuse the event itself; then it has not happened.
        fits: whether it can happen in a configuration.
    """

    act: Act
    moments: tuple[str, ...]
    refusals: tuple[str, ...] = ()
    fits: Callable[[Config], bool] = lambda config: True


EVENTS: dict[str, Event] = {}


def event(name: str, moments: tuple[str, ...], **rest: Any) -> Callable[[Act], Act]:
    """Add an event to the table."""

    def add(act: Act) -> Act:
        EVENTS[name] = Event(act, moments, **rest)
        return act

    return add


def act(run: Run, planned: Planned) -> Any:
    """Let an event happen."""
    return EVENTS[planned.name].act(run, random.Random(planned.seed))


# Which parameters are trained.


@event("freeze", (BEFORE, BETWEEN, AFTER))
def _(run: Run, pick: random.Random) -> None:
    pick.choice(parameters(run)).requires_grad_(False)
    parameters(run)[-1].requires_grad_()  # the loss must depend on a trainable parameter


@event("unfreeze", (BEFORE, BETWEEN, AFTER))
def _(run: Run, pick: random.Random) -> None:
    run.model.requires_grad_()


@event("freeze through the groups", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    pick.choice(mains(run)).requires_grad_(False)
    parameters(run)[-1].requires_grad_()


@event("freeze and unfreeze all", ANY)
def _(run: Run, pick: random.Random) -> None:
    before = [parameter.requires_grad for parameter in parameters(run)]
    run.model.requires_grad_(False)
    try:
        look(run)
    finally:
        for parameter, flag in zip(parameters(run), before, strict=True):
            parameter.requires_grad_(flag)


@event("unfreeze and save", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    run.model.requires_grad_()
    run.state()


@event("unfreeze and abort", OUTSIDE, fits=lambda config: config.accumulate == 1)
def _(run: Run, pick: random.Random) -> None:
    run.model.requires_grad_()
    run.abort()


@event("add a group", ANY, fits=lambda config: config.held_out)
def _(run: Run, pick: random.Random) -> None:
    known = {id(run.model_of(main)) for main in mains(run)}
    fresh = [parameter for parameter in parameters(run) if id(parameter) not in known]
    if fresh:
        pick.choice(run.optimizers).add_param_group({"params": fresh})


@event("toggle an optimizer", (BEFORE,), fits=lambda config: config.in_turns)
def _(run: Run, pick: random.Random) -> None:
    """As Lightning does around the training of one network of a GAN."""
    other = pick.choice(run.optimizers)
    held = [p for group in other.param_groups for p in group["params"] if p.requires_grad]
    for parameter in held:
        parameter.requires_grad_(False)
    parameters(run)[-1].requires_grad_()
    with torch.no_grad():
        run.forward(99)
    for parameter in held:
        parameter.requires_grad_()


# Gradients.


def edit(name: str, change: Callable[[Tensor, random.Random], Tensor | None]) -> None:
    """Add an event that changes every gradient that the optimizers would read."""

    def edit_(run: Run, pick: random.Random) -> None:
        run.unscale()
        with torch.no_grad():
            for main in mains(run):
                own = random.Random(pick.random())  # whether there is a gradient here or not
                if main.grad is not None:
                    main.grad = change(main.grad, own)

    EVENTS[name] = Event(edit_, (BEFORE, BETWEEN))


edit("gradients times one", lambda grad, pick: grad.mul_(1.0))
edit("gradients halved in place", lambda grad, pick: grad.mul_(0.5))
edit("gradients halved into new tensors", lambda grad, pick: grad * 0.5)
edit("gradients added to", lambda grad, pick: grad.add_(0.01))
edit("gradients masked", lambda grad, pick: grad.mul_((grad > 0).to(grad.dtype)))
edit("gradients dropped here and there", lambda grad, pick: grad if pick.random() < 0.5 else None)
edit("gradients through .data", lambda grad, pick: through_data(grad, 0.5))
edit("gradients made finite", lambda grad, pick: grad.nan_to_num_(0.0, 0.0, 0.0))


@event("clip by torch's norm", (BETWEEN,))
def _(run: Run, pick: random.Random) -> None:
    run.unscale()
    finite = [main for main in mains(run) if main.grad is not None and bool(main.grad.isfinite().all())]
    nn.utils.clip_grad_norm_(finite, 0.2)


@event("clip by torch's value", (BETWEEN,))
def _(run: Run, pick: random.Random) -> None:
    run.unscale()
    if with_gradient := [main for main in mains(run) if main.grad is not None]:
        nn.utils.clip_grad_value_(with_gradient, 0.05)


@event("zero_grad of the optimizer", (BEFORE, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad()


# Zeros that are written to gradients held for a fused step drop them.
@event("zero_grad(set_to_none=False) of the optimizer", (BEFORE, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    run.unscale()
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=False)


@event("zero_grad of the model", (BEFORE, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    run.settle()
    run.zero_model()


@event("zero_grad(set_to_none=False) of the model", (BEFORE, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    run.unscale()
    run.zero_model(set_to_none=False)


@event("gradients of the model clipped by torch's norm", (BETWEEN,))
def _(run: Run, pick: random.Random) -> None:
    run.unscale()
    holders = [run.holder_of(parameter) for parameter in parameters(run)]
    finite = [one for one in holders if one.grad is not None and bool(one.grad.isfinite().all())]
    nn.utils.clip_grad_norm_(finite, 0.2)


@event("gradients of the model masked", (BEFORE, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    run.unscale()
    for parameter in parameters(run):
        holder = run.holder_of(parameter)
        if holder.grad is not None and pick.random() < 0.5:
            holder.grad.mul_((holder.grad > 0).to(holder.grad.dtype))


@event("gradients of the model assigned", (BEFORE, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    run.unscale()
    for parameter in parameters(run):
        holder = run.holder_of(parameter)
        if holder.grad is not None and pick.random() < 0.5:
            holder.grad = holder.grad * 0.5


@event("gradients of the model dropped here and there", (BEFORE, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    run.unscale()
    for parameter in parameters(run):
        if pick.random() < 0.5:
            run.holder_of(parameter).grad = None


@event("zero_grad and continue", (BETWEEN,))
def _(run: Run, pick: random.Random) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    raise NextIteration


@event("zero_grad of the model and continue", (BETWEEN,))
def _(run: Run, pick: random.Random) -> None:
    run.settle()
    run.zero_model()
    raise NextIteration


@event("abort", (BEFORE, AFTER))
def _(run: Run, pick: random.Random) -> None:
    run.abort()


@event("abort and continue", (FORWARDED, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    run.abort()
    raise NextIteration


@event("unscale", (BEFORE, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    run.unscale()


@event("a second backward pass", (BETWEEN,))
def _(run: Run, pick: random.Random) -> None:
    for loss_id, loss in enumerate(run.forward(77)):
        run.backward(loss, loss_id, retain=True)


# Weights.


@event("weights by copy_", (BEFORE, BETWEEN, AFTER))
def _(run: Run, pick: random.Random) -> None:
    parameter = pick.choice(parameters(run))
    with torch.no_grad():
        parameter.copy_(parameter * 0.5)


@event("weights clamped", (BEFORE, AFTER, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    with torch.no_grad():
        for parameter in parameters(run):
            parameter.clamp_(-0.2, 0.2)


@event("weights re-initialised", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    torch.default_generator.manual_seed(pick.randrange(1000))
    nn.init.normal_(pick.choice(parameters(run)), std=0.2)


@event("masters written", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    """As optimizers do that move parameters outside of step(): SAM, Lookahead, SWA.

    Adds a little, too, because by hand a write is seen only where it changes a value, which may be zero.
    """
    with torch.no_grad():
        for main in mains(run):
            main.mul_(0.9).add_(2**-10)


@event("load_state_dict of the model", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    state = {name: value.clone() for name, value in run.values().items()}
    for value in state.values():
        if value.is_floating_point():
            value.mul_(0.75)
    run.load_values(state)


@event("load_state_dict of what is there", (BEFORE, BETWEEN, AFTER))
def _(run: Run, pick: random.Random) -> None:
    run.load_values({name: value.clone() for name, value in run.values().items()})


@event("load_state_dict, and then a layer re-initialised", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    run.load_values({name: value.clone() for name, value in run.values().items()})
    torch.default_generator.manual_seed(pick.randrange(1000))
    nn.init.normal_(pick.choice(parameters(run)), std=0.2)


@event(
    "load_state_dict(assign=True)",
    OUTSIDE,
    refusals=("load_state_dict(assign=True) would replace",),
    # torch itself unties parameters that are assigned.
    fits=lambda config: not {"tied", "shared"} & set(config.parts),
)
def _(run: Run, pick: random.Random) -> None:
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in parameters(run)]
    run.load_values(state, assign=True)
    for parameter, flag in zip(parameters(run), flags, strict=True):
        parameter.requires_grad_(flag)


@event("load_state_dict of the optimizers", ANY)
def _(run: Run, pick: random.Random) -> None:
    run.load_optimizers([copy.deepcopy(optimizer.state_dict()) for optimizer in run.optimizers])


@event("swap weights in and out", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    held = [parameter.detach().clone() for parameter in parameters(run)]
    with torch.no_grad():
        for parameter in parameters(run):
            parameter.mul_(0.5)
        look(run)
        for parameter, value in zip(parameters(run), held, strict=True):
            parameter.copy_(value)


@event("average of weights, evaluated", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    average = run.keep.setdefault("average", {})
    for name, value in run.values().items():
        if value.is_floating_point():
            average[name] = 0.5 * average.get(name, value) + 0.5 * value
    held = {name: value.clone() for name, value in run.values().items()}
    run.load_values({**held, **average})
    look(run)
    run.load_values(held)


@event("AveragedModel", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    average = run.keep.get("averaged") or swa_utils.AveragedModel(run.model)
    run.keep["averaged"] = average
    average.update_parameters(run.model)


@event("statistics reset", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    for module in run.model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()


# Saving, loading, copies.


@event("save", ANY)
def _(run: Run, pick: random.Random) -> None:
    run.keep["saved"] = run.state()
    run.keep["structure"] = run.structure()


@event("go back to what was saved", OUTSIDE)
def _(run: Run, pick: random.Random) -> None:
    if run.structure() is not None and run.keep.get("structure") == run.structure():
        run.load(run.keep["saved"])


@event("restart", ANY)
def _(run: Run, pick: random.Random) -> Run:
    return run.restarted()


@event("deep copy of the model, written", ANY)
def _(run: Run, pick: random.Random) -> None:
    twin = copy.deepcopy(run.model)
    with torch.no_grad(), run.casts():
        for parameter in twin.parameters():
            parameter.zero_()
        twin.eval()(*inputs(run))


@event("pickle of the model", ANY)
def _(run: Run, pick: random.Random) -> None:
    try:
        torch.save(run.model, io.BytesIO())
    except AttributeError as error:
        # Hooks of other events and of the run by hand are local functions.
        if "local object" not in str(error):
            raise


# Exceptions.


@event("exception in forward", (BEFORE,))
def _(run: Run, pick: random.Random) -> None:
    once(pick, lambda fire: pick.choice(list(run.model.parts)).register_forward_hook(lambda *_: fire()))


@event("exception in backward", (BEFORE, FORWARDED))
def _(run: Run, pick: random.Random) -> None:
    if trainable := [parameter for parameter in parameters(run) if parameter.requires_grad]:
        chosen = pick.choice(trainable)
        once(pick, lambda fire: chosen.register_hook(lambda grad: fire()))


@event("exception before the optimizer", (BEFORE, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    once(pick, lambda fire: pick.choice(run.optimizers).register_step_pre_hook(lambda *_: fire()))


# ASGD and Rprop read the learning rate while they create a parameter's state, so the state stays half made and fails
# later. torch's fused SGD counts neither steps nor versions, so it does not show that some groups were stepped.
@event(
    "exception in the optimizer",
    (BEFORE, BETWEEN),
    fits=lambda config: not {"ASGD", "Rprop", "SGD fused"} & set(config.optimizers),
)
def _(run: Run, pick: random.Random) -> None:
    optimizer = pick.choice(run.optimizers)
    at = pick.randrange(len(optimizer.param_groups))
    optimizer.param_groups[at] = Failing(optimizer.param_groups[at])
    once(pick, optimizer.param_groups[at].fail_with)


class Failing(dict[str, Any]):
    """A parameter group whose first read of the learning rate raises, after the groups before it were stepped."""

    fire: Callable[[], None] | None = None

    def fail_with(self, fire: Callable[[], None]) -> Failing:
        self.fire = fire
        return self

    def remove(self) -> None:
        self.fire = None

    def __getitem__(self, key: str) -> Any:
        if key == "lr" and self.fire is not None:
            self.fire()
        return super().__getitem__(key)


@event("exception after the optimizer", (BEFORE, BETWEEN))
def _(run: Run, pick: random.Random) -> None:
    once(pick, lambda fire: pick.choice(run.optimizers).register_step_post_hook(lambda *_: fire()), late=True)


@event("exception between", ANY)
def _(run: Run, pick: random.Random) -> None:
    raise Injected(zeroes=pick.random() < 0.5)


# Other passes through the model.


@event("evaluation", ANY)
def _(run: Run, pick: random.Random) -> None:
    look(run)


@event("evaluation in inference mode", ANY)
def _(run: Run, pick: random.Random) -> None:
    with torch.inference_mode():
        run.model.eval()
        run.model(*inputs(run))
        run.model.train()


@event("training mode without gradients", ANY)
def _(run: Run, pick: random.Random) -> None:
    with torch.no_grad():
        run.forward(55)


@event("a forward pass for nothing", ANY)
def _(run: Run, pick: random.Random) -> None:
    run.forward(44)


@event("torch.autograd.grad", (BEFORE, AFTER))
def _(run: Run, pick: random.Random) -> None:
    with run.casts():
        # The forward pass freezes model parameters that were frozen through the groups.
        loss = sum(run.forward(33))
        trainable = [parameter for parameter in parameters(run) if parameter.requires_grad]
        torch.autograd.grad(loss, trainable, allow_unused=True)


# torch does not restore a layer that is registered under two names.
@event("functional_call", ANY, fits=lambda config: "shared" not in config.parts)
def _(run: Run, pick: random.Random) -> None:
    halved = {name: parameter.detach() * 0.5 for name, parameter in run.model.named_parameters()}
    with run.casts(), torch.no_grad():
        run.model.eval()
        torch.func.functional_call(run.model, halved, inputs(run), tie_weights=True)
        run.model.train()


def transforms(without: set[str]) -> Callable[[Config], bool]:
    """Whether torch itself can transform the model's function: a condition for :attr:`Event.fits`."""
    hook = "backward hook of a module"
    return lambda config: not (without & set(config.parts) or any(e.name == hook for e in config.events))


@event("torch.func.grad", ANY, fits=transforms({"checkpointed", "lstm", "shared"}))
def _(run: Run, pick: random.Random) -> None:
    values = {name: parameter.detach() for name, parameter in run.model.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(run.model, values, inputs(run))[0].float().sum()

    run.model.eval()
    with run.casts():
        torch.func.grad(loss)(values)
    run.model.train()


# torch's forward derivatives of norms do not support two dtypes.
@event(
    "torch.func.jvp and vmap",
    ANY,
    fits=lambda config: not set(config.parts) - {"linear", "scalar", "sometimes"},
)
def _(run: Run, pick: random.Random) -> None:
    values = {name: parameter.detach() for name, parameter in run.model.named_parameters()}
    x, ids = inputs(run)

    def output(x: Tensor) -> Tensor:
        return torch.func.functional_call(run.model, values, (x, ids))[0].float()

    run.model.eval()
    with run.casts():
        torch.func.jvp(output, (x,), (torch.ones_like(x),))
        torch.func.vmap(lambda row: output(row[None].expand_as(x)))(x)
    run.model.train()


@event("evaluation in a thread", ANY)
def _(run: Run, pick: random.Random) -> None:
    thread = threading.Thread(target=look, args=(run,))
    thread.start()
    thread.join()


@event("evaluation mode from here on", (BEFORE, AFTER), fits=lambda config: "lstm" not in config.parts)
def _(run: Run, pick: random.Random) -> None:
    run.model.eval()


@event("another engine steps", ANY)
def _(run: Run, pick: random.Random) -> None:
    run.other_engine(pick.choice(("O0", "O1", "O2", "O5")))


# Hooks of user code.


@event("forward hook", (BEFORE, AFTER))
def _(run: Run, pick: random.Random) -> None:
    pick.choice(list(run.model.parts)).register_forward_hook(lambda module, args, out: out * 0.5)


@event("gradient hook", (BEFORE, AFTER))
def _(run: Run, pick: random.Random) -> None:
    if trainable := [parameter for parameter in parameters(run) if parameter.requires_grad]:
        pick.choice(trainable).register_hook(lambda grad: grad * 0.5)


def whole_passes(config: Config) -> bool:
    """Whether ``.grad`` has the gradient of one pass alone: a condition for :attr:`Event.fits`."""
    return config.accumulate == 1 and not config.held_out


@event("hook after gradients are added up", (BEFORE, AFTER), fits=whole_passes)
def _(run: Run, pick: random.Random) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad *= 0.5

    if trainable := [parameter for parameter in parameters(run) if parameter.requires_grad]:
        pick.choice(trainable).register_post_accumulate_grad_hook(halve)


@event("backward hook of a module", (BEFORE, AFTER))
def _(run: Run, pick: random.Random) -> None:
    pick.choice(list(run.model.heads)).register_full_backward_hook(
        lambda module, given, grads: tuple(g if g is None else g * 0.5 for g in given)
    )


@event("step hook that looks", (BEFORE, AFTER))
def _(run: Run, pick: random.Random) -> None:
    def read(optimizer: Any, *_: Any) -> None:
        assert all(grad is not None for grad in grads_of(optimizer))

    pick.choice(run.optimizers).register_step_pre_hook(read)


@event("step hook that edits", (BEFORE, AFTER))
def _(run: Run, pick: random.Random) -> None:
    def halve(optimizer: Any, *_: Any) -> None:
        for grad in grads_of(optimizer):
            grad.mul_(0.5)

    pick.choice(run.optimizers).register_step_pre_hook(halve)


# Overflows.


@event("inf in a gradient", (BEFORE, FORWARDED))
def _(run: Run, pick: random.Random) -> None:
    if trainable := [
        parameter for parameter in parameters(run) if parameter.requires_grad and parameter.numel()
    ]:
        value = pick.choice((float("inf"), float("-inf"), float("nan")))
        chosen = pick.choice(trainable)
        handles: list[Any] = []

        def spoil(grad: Tensor) -> Tensor:
            handles[0].remove()
            spoilt = grad.clone()
            spoilt.view(-1)[-1] = value
            return spoilt

        handles.append(chosen.register_hook(spoil))


@event("inf in the batch", (BEFORE,))
def _(run: Run, pick: random.Random) -> None:
    handles: list[Any] = []

    def spoil(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        handles[0].remove()
        return (args[0] * float("inf"), *args[1:])

    handles.append(run.model.parts[0].register_forward_pre_hook(spoil))


@event("inf in the outputs", (BEFORE,))
def _(run: Run, pick: random.Random) -> None:
    handles: list[Any] = []

    def spoil(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        handles[0].remove()
        return out * float("nan")

    handles.append(pick.choice(list(run.model.heads)).register_forward_hook(spoil))


# Losses that reach further.


# Recomputation in its pass uses the casts of the other engine, which torch refuses.
@event(
    "another engine's loss reaches the model",
    (BEFORE, BETWEEN),
    fits=lambda config: "checkpointed" not in config.parts,
)
def _(run: Run, pick: random.Random) -> None:
    run.critic_step(88)


# Reads.


@event("state_dict of the engine", ANY)
def _(run: Run, pick: random.Random) -> None:
    run.state()


@event("state_dict of the model", ANY)
def _(run: Run, pick: random.Random) -> None:
    run.values()


@event("state_dict of the optimizers", ANY)
def _(run: Run, pick: random.Random) -> None:
    for optimizer in run.optimizers:
        optimizer.state_dict()


@event("memory and properties", ANY)
def _(run: Run, pick: random.Random) -> None:
    run.look()


# Optimizers.


@event("learning rate", ANY)
def _(run: Run, pick: random.Random) -> None:
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5


@event("weight decay", ANY)
def _(run: Run, pick: random.Random) -> None:
    for group in pick.choice(run.optimizers).param_groups:
        group["weight_decay"] = 0.01


@event("learning-rate schedule", (AFTER,))
def _(run: Run, pick: random.Random) -> None:
    for optimizer in run.optimizers:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step()


@event(
    "optimizer.step() instead",
    (BETWEEN,),
    refusals=("optimizer.step() was called",),
    fits=lambda config: config.accumulate == 1,
)
def _(run: Run, pick: random.Random) -> None:
    run.optimizers[0].step()


@event("step with a closure", (AFTER,), fits=lambda config: config.accumulate == len(config.optimizers) == 1)
def _(run: Run, pick: random.Random) -> None:
    run.step_with_closure(22)


MOMENTS = {name: one.moments for name, one in EVENTS.items()}
"""What :func:`fuzz.config.draw` chooses from."""


# Helpers of the events.


def parameters(run: Run) -> list[nn.Parameter]:
    """The parameters of the model."""
    return list(run.model.parameters())


def mains(run: Run) -> list[Tensor]:
    """The parameters in the groups of the optimizers."""
    return [p for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]]


def grads_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The gradients that an optimizer would read."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def inputs(run: Run) -> tuple[Tensor, Tensor]:
    """A batch that is not trained on."""
    return batch(run.config.seed)[:2]


def look(run: Run) -> None:
    """Run the model in evaluation mode."""
    run.model.eval()
    with torch.no_grad(), run.casts():
        run.model(*inputs(run))
    run.model.train()


def through_data(grad: Tensor, factor: float) -> Tensor:
    """Write a gradient without raising its version counter."""
    grad.data.mul_(factor)
    return grad


def once(pick: random.Random, register: Callable[[Callable[[], None]], Any], *, late: bool = False) -> None:
    """Raise from a hook, the first time that it is called. ``late``: the hook runs after the optimizer's own code."""
    handles: list[Any] = []

    def fire() -> None:
        handles[0].remove()
        raise Injected(is_late=late, zeroes=zeroes)

    handles.append(register(fire))
    zeroes = pick.random() < 0.5
