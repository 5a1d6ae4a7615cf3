"""The other side of the comparison: mixed precision by hand, in plain torch.

It is slow. Where halfpeak compares versions, it keeps whole copies: their values show whether user code has written a
weight or its master. Of halfpeak it uses the table of levels (:mod:`halfpeak.core.levels`) and, at O1 and O4, the scope
of casts, because the fuzzer tests orders of calls and not the dtypes of single operations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import Optimizer

from fuzz import models
from fuzz.config import OPTIMIZERS, Config
from halfpeak.casting.casts import OpCasts
from halfpeak.core.levels import Properties, resolve
from halfpeak.core.optimizer_state import params_of
from halfpeak.fused.base import FusedOptimizer
from halfpeak.fused.decision import StepInputs
from support.snapshot import raw

LOW = (torch.float16, torch.bfloat16)


class Collapse(Exception):
    """Gradients stay infinite, and the scale cannot fall."""


class Result(NamedTuple):
    """The result of a step: the values of :class:`halfpeak.StepResult` that are compared."""

    boundary: bool
    found_inf: bool = False
    scale: float = 1.0
    norm: float | None = None


class Scale:
    """The loss scale of one loss, in plain numbers, written from the documentation of :class:`halfpeak.ScaleConfig`."""

    def __init__(self, config: Config, properties: Properties) -> None:
        self.rule = config.scale_config
        self.dynamic = properties.loss_scale == "dynamic"
        start = min(self.rule.init, self.rule.ceiling)
        self.scale = start if self.dynamic else float(properties.loss_scale)
        self.clean, self.left, self.stuck = 0, self.rule.hysteresis, 0

    def update(self, found_inf: bool, *, of_loss: bool = False) -> None:
        """Follow one step. ``of_loss``: the loss itself was not finite."""
        rule, recovers = self.rule, self.rule.recovers and self.dynamic
        if recovers and of_loss:
            self.stuck += 1
            return
        had = self.clean
        moved = self._fall() if found_inf else self._rise()
        if recovers and self.scale < min(rule.init, rule.ceiling) / 16 and moved:
            # Far below its start, the scale soon tries to grow, or later if a growth has just failed.
            short = 3 if not found_inf else 96 if had >= max(rule.interval - 3, 0) else 12
            self.clean = max(rule.interval - short, 0)
        if not found_inf:
            self.stuck = max(self.stuck - (self.clean % 2 == 0), 0) if recovers else 0

    def _fall(self) -> bool:
        self.clean = 0
        if not self.dynamic:
            self.stuck += 1
            return True
        self.left -= 1
        if self.left <= 0:
            lowered = max(self.scale * self.rule.backoff, self.rule.floor)
            self.stuck += lowered >= self.scale
            self.scale = lowered
        return True

    def _rise(self) -> bool:
        rule, self.clean = self.rule, self.clean + 1
        grows = self.dynamic and self.clean >= rule.interval
        if self.dynamic and (rule.refill == "clean" or grows):
            self.left = rule.hysteresis
        if grows:
            self.clean, self.scale = 0, min(self.scale * rule.growth, rule.ceiling)
        return grows

    @property
    def is_exhausted(self) -> bool:
        return self.rule.patience is not None and self.stuck >= self.rule.patience

    def values(self) -> tuple[float, int, int, int]:
        return self.scale, self.clean, self.left, self.stuck


class Pair:
    """A model parameter and its main parameter, maybe one tensor, and copies of both from when they last agreed."""

    def __init__(self, model: nn.Parameter, main: Tensor) -> None:
        self.model, self.main = model, main
        self.trainable = main.requires_grad
        self.agree()

    def sync(self) -> None:
        """Copy a written side to the other; a master keeps its digits where it still rounds to the weight."""
        if self.model is self.main:
            return
        value = self.value()
        if not same_bits(self.main, value):
            self.main.detach().copy_(value)
        elif not same_bits(self.main, self.seen_main):
            self.model.detach().copy_(value)
        self.agree()

    def publish_written(self) -> None:
        """:meth:`sync` if the master was written. A written weight waits for a backward pass: it may be swapped out again."""
        if self.model is not self.main and not same_bits(self.main, self.seen_main):
            self.sync()

    def agree_on_flags(self) -> None:
        """Copy ``requires_grad`` to the model if it was changed in the groups, else from the model to the groups."""
        if self.main.requires_grad != self.trainable:
            self.model.requires_grad_(self.main.requires_grad)
        self.main.requires_grad_(self.model.requires_grad)
        self.trainable = self.model.requires_grad

    def value(self) -> Tensor:
        """The value that both sides stand for, with every digit of a master."""
        model, main = self.model.detach(), self.main.detach()
        if model is main or not same_bits(main, self.seen_main) or same_bits(model, self.seen_model):
            return main
        return torch.where(main.to(model.dtype) == model, main, model.float())

    def publish(self) -> None:
        if self.model is not self.main:
            self.model.detach().copy_(self.main.detach())
            self.agree()

    def sides(self) -> tuple[Tensor, ...]:
        """The tensors that :meth:`sync` writes."""
        return self.model.detach(), self.main.detach(), self.seen_model, self.seen_main

    def agree(self) -> None:
        if self.model is not self.main:
            self.seen_model, self.seen_main = self.model.detach().clone(), self.main.detach().clone()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


class Reference:
    """One run by hand, with the methods of :class:`fuzz.subject.Subject`."""

    def __init__(self, config: Config, like: Structure | None = None) -> None:
        self.config = config
        options = dict(config.options)
        self.op_lists = options.pop("op_lists", "apex")
        self.norm_rule = options.pop("norms", "all")
        self.restore = options.pop("restore_buffers", True)
        options.pop("keep_gradient_memory", None)
        self.properties = resolve(config.level, **options)
        self.model = models.build(config.parts, config.heads, config.seed)
        structure = like or first_structure(config, self.model)
        structure.freeze(self.model)
        self.optimizers = structure.optimizers(config, self.model)
        self.pairs: dict[int, Pair] = {}
        self.members: list[list[int]] = [[] for _ in self.optimizers]
        self._convert(self.model)
        # At levels that convert the model, its state_dict() is float32.
        self.widens = self.properties.cast_model_type not in (None, False)
        self.keep: dict[str, Any] = {}
        self.scales = [Scale(config, self.properties) for _ in range(config.losses)]
        self.micro = self.num_steps = self.num_skipped = 0
        self.stats: list[Tensor] | None = None
        self._forget()

    # The interface for events.

    def forward(self, at: int) -> list[Tensor]:
        """The losses of iteration ``at``, one per loss scaler."""
        for pair in self.pairs.values():
            pair.publish_written()
        self._agree_on_flags()
        if self.stats is None and torch.is_grad_enabled():
            self.stats = [buffer.clone() for buffer in self._statistics()]
        with self.casts():
            return losses_of(self.config, self.model, at)

    def casts(self) -> AbstractContextManager[Any]:
        """The casts of a forward pass, before which weights and masters agree on ``requires_grad``."""
        self._agree_on_flags()
        if not self.properties.patch_torch_functions:
            return nullcontext()
        assert self.properties.patch_torch_functions_type is not None
        if self.op_lists == "torch":
            return torch.autocast("cpu", self.properties.patch_torch_functions_type)
        return OpCasts(self.properties.patch_torch_functions_type)

    def backward(
        self, loss: Tensor, loss_id: int = 0, optimizers: Sequence[int] | None = None, *, retain: bool = False
    ) -> None:
        """Compute new gradients, divide them by the scale and add them to those of the window."""
        chosen = range(len(self.optimizers)) if optimizers is None else optimizers
        self.sync(chosen)
        scale = self.scales[loss_id]
        if self.config.accumulate > 1:
            loss = loss / self.config.accumulate
        self._look_at_window(chosen)
        losses = [*self.waiting, loss]
        with self._fresh_grads(losses, scale.scale, retain=retain) as fresh:
            bad_loss = scale.rule.recovers and scale.dynamic and not all(bool(x.isfinite()) for x in losses)
        for o in chosen:
            self._recheck(o)
        found = any(self._add(fresh, scale.scale, chosen))
        if self.window == "scaled":
            # The engine checks the sums that autograd has made, which may overflow although no addend does.
            found = found or not all(bool(grad.isfinite().all()) for o in chosen for grad in self.grads_of(o))
        for o in chosen:
            self.found[o] = self.found[o] or found or bad_loss
            self.left[o] = self._seen_grads(o)
        if bad_loss:
            self.bad_losses.add(loss_id)
        self.found_by_loss[loss_id] = self.found_by_loss.get(loss_id, False) or found
        inside = (self.micro + 1) % self.config.accumulate > 0
        self.window = "scaled" if inside and self.sums_scaled and self.window != "read" else "read"
        self.had_gradients = self._has_gradients(chosen)

    @contextmanager
    def _fresh_grads(
        self, losses: Sequence[Tensor], scale: float, *, retain: bool = False
    ) -> Generator[list[Tensor | None]]:
        """The gradients of some losses, summed by autograd; gradients that are already there stay."""
        every = list(self.model.parameters())
        held = [parameter.grad for parameter in every]
        for parameter in every:
            parameter.grad = None
        fresh: list[Tensor | None] = []
        try:
            # Recomputation in the backward pass needs the same casts; torch.autocast restores its own.
            with self.casts() if self.op_lists == "apex" else nullcontext():
                for loss in losses:
                    (loss.float() * scale).backward(retain_graph=retain)
            fresh = [parameter.grad for parameter in every]
        except BaseException:
            for parameter, grad in zip(every, held, strict=True):
                parameter.grad = grad
            if self.window == "scaled" or self.waiting:
                # Autograd may have added to scaled gradients of earlier passes, so the window begins again.
                self.abort()
            raise
        self.waiting = []
        for parameter, grad in zip(every, held, strict=True):
            parameter.grad = grad
        yield fresh

    def _add(self, fresh: Sequence[Tensor | None], scale: float, chosen: Iterable[int]) -> list[bool]:
        """Unscale gradients and add them to the window's; return for each of ``chosen`` whether one is not finite."""
        owner = {id(pair.model): o for o in range(len(self.optimizers)) for pair in self.pairs_of(o)}
        found = dict.fromkeys(chosen, False)
        for parameter, grad in zip(self.model.parameters(), fresh, strict=True):
            o = owner.get(id(parameter))
            if grad is None or (o is not None and o not in found):
                continue
            main = self.main_of(parameter)
            unscaled = (grad.float() / scale).to(main.dtype)
            if o is not None and not bool(unscaled.isfinite().all()):
                found[o] = True
            main.grad = unscaled if main.grad is None else main.grad.add_(unscaled)
        return list(found.values())

    def delayed(self, at: int) -> None:
        """A backward pass whose gradients wait for the next one."""
        (loss,) = self.forward(at)
        self.waiting.append(loss / self.config.accumulate)

    def critic_step(self, at: int) -> None:
        """Another network, trained by a loss that reaches this one."""
        if "critic" not in self.keep:
            net = critic()
            self.keep["critic"] = net, torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer = self.keep["critic"]
        loss = net(sum(self.forward(at)).view(1, 1)).sum()
        self.sync()
        with self._fresh_grads([loss], 64.0) as fresh:
            every = list(self.model.parameters())
        for o in range(len(self.optimizers)):
            own = {id(pair.model) for pair in self.pairs_of(o)}
            if any(id(p) in own and grad is not None for p, grad in zip(every, fresh, strict=True)):
                self._recheck(o)
                of_own = [grad if id(p) in own else None for p, grad in zip(every, fresh, strict=True)]
                self.found[o] = self._add(of_own, 64.0, [o])[0] or self.found[o]
                self.left[o] = self._seen_grads(o)
                self.window = "read"
        stepped = {id(pair.model) for o in range(len(self.optimizers)) for pair in self.pairs_of(o)}
        self._add([None if id(p) in stepped else g for p, g in zip(every, fresh, strict=True)], 64.0, [])
        if all(bool(p.grad.isfinite().all()) for p in net.parameters()):
            for p in net.parameters():
                p.grad /= 64.0
            optimizer.step()
        optimizer.zero_grad()

    def _look_at_window(self, chosen: Iterable[int]) -> None:
        """Before a backward pass: end a window whose gradients have been dropped."""
        if self.window == "scaled" and self.had_gradients and not self._has_gradients(chosen):
            self.window = "empty"

    def _has_gradients(self, chosen: Iterable[int]) -> bool:
        return any(self.grads_of(o) for o in chosen)

    def step(self, optimizers: Sequence[int] | None = None) -> Result:
        """Clip, then step or skip."""
        if (self.micro + 1) % self.config.accumulate:
            self.micro += 1
            return Result(False, scale=self.scales[0].scale)
        chosen = range(len(self.optimizers)) if optimizers is None else optimizers
        self._adopt(chosen=chosen, joined=True)
        self._follow()
        self._agree_on_flags()
        for o in chosen:
            if self.left[o] != self._seen_grads(o):
                self._look_at_unseen(o)
        found = any(self.found[o] for o in chosen)
        has_gradients = any(self.grads_of(o) for o in chosen)
        norm = self._clip(list({id(g): g for o in chosen for g in self.grads_of(o)}.values()))
        if norm is not None and not math.isfinite(norm):
            if not found:
                # Finite gradients with an infinite norm count as an overflow of every loss.
                self.found_by_loss = dict.fromkeys(self.found_by_loss, True)
            found = True
        for o in chosen if found else ():
            self._lay_out(self.optimizers[o])
            for pair in self.pairs_of(o):
                pair.main.grad = None
        used, ended = [self.scales[loss_id] for loss_id in self.found_by_loss], list[bool]()
        keep = self.keep.pop("keep gradients", False)
        try:
            # Called without gradients, too: nothing moves, but hooks and schedules see a step.
            for o in chosen:
                ended.append(self._call(o))
        except BaseException as error:
            if getattr(error, "stepped", False) and len(ended) + 1 == len(chosen):
                self._end(chosen, found, counts=has_gradients)
            else:
                self.abort(chosen)
            raise
        self._end(chosen, found, counts=has_gradients, keep=keep)
        if found and any(scale.is_exhausted for scale in used):
            raise Collapse
        return Result(True, found, self.scales[0].scale, norm)

    def _lay_out(self, optimizer: Optimizer) -> None:
        """Measure the gradients, as a skipped fused step does: the first measurement lays out the flat buffers."""
        hooks = optimizer._optimizer_step_pre_hooks
        by_value = self.config.clip is not None and self.config.clip[0] == "value"
        if isinstance(optimizer, FusedOptimizer) and self.config.is_fused and not hooks and not by_value:
            mains = params_of(optimizer)
            optimizer.measure(StepInputs([main.grad for main in mains], mains, torch.ones(())))

    def _call(self, o: int, *closure: Callable[[], None]) -> bool:
        """Call ``optimizer.step()``; set on an exception whether it came after the optimizer's own code."""
        mains, idle = self._mains(o), not self.grads_of(o)
        # A step may change no bit. torch's fused kernels raise no version, and with zero gradients only count the step.
        before, counts = [(main.detach().clone(), main._version) for main in mains], self._step_counts(o)
        try:
            self.optimizers[o].step(*closure)
        except BaseException as error:
            moved = self._step_counts(o) != counts or any(
                main._version != version or not same_bits(main, value)
                for main, (value, version) in zip(mains, before, strict=True)
            )
            error.stepped = moved or idle or getattr(error, "is_late", False)  # type: ignore[attr-defined]
            if error.stepped:  # type: ignore[attr-defined]
                self._publish(o)
            raise
        self._publish(o)
        return True

    def _step_counts(self, o: int) -> list[float]:
        state = self.optimizers[o].state
        return [float(state[main].get("step", 0)) if main in state else 0.0 for main in self._mains(o)]

    def _publish(self, o: int) -> None:
        for pair in self.pairs_of(o):
            pair.publish()

    def _mains(self, o: int) -> list[Tensor]:
        return [p for group in self.optimizers[o].param_groups for p in group["params"]]

    def step_with_closure(self, at: int) -> None:
        """Evaluate until the gradients are finite, then step."""
        self.sync()

        def evaluate() -> None:
            self._drop(0)
            while True:
                for loss_id, loss in enumerate(self.forward(at)):
                    self.backward(loss, loss_id, retain=True)
                if not any(self.found):
                    break
                for buffer, saved in zip(self._statistics(), self.stats or (), strict=False):
                    buffer.copy_(saved)
                used = [self.scales[loss_id] for loss_id in self.found_by_loss]
                self.found_by_loss = {
                    loss_id: found for loss_id, found in self.found_by_loss.items() if found
                }
                self._update_scales()
                if not any(scale.dynamic for scale in used) or any(scale.is_exhausted for scale in used):
                    raise Collapse
                self._drop(0)
                self.stats = None
            self._clip(self.grads_of(0))

        self._call(0, torch.enable_grad()(evaluate))
        self._end([0], False)

    def zero_model(self) -> None:
        """``model.zero_grad()``, which also drops the gradients that masters have."""
        self.model.zero_grad()
        for parameter in self.model.parameters():
            self.main_of(parameter).grad = None

    def look(self) -> None:
        """Do nothing: the subject reads properties of its engine."""

    def other_engine(self, level: str) -> None:
        """Do nothing: the subject steps an engine of another model."""

    def unscale(self) -> None:
        """Note the call. Gradients are never scaled here, but an exception in the next backward pass depends on it."""
        if self.window == "scaled":
            self.window = "read"

    def abort(self, optimizers: Iterable[int] | None = None) -> None:
        """Drop the window."""
        self.micro -= self.micro % self.config.accumulate
        for o in range(len(self.optimizers)) if optimizers is None else optimizers:
            self._drop(o)
        self.found_by_loss, self.bad_losses, self.waiting = {}, set(), []

    def sync(self, chosen: Iterable[int] | None = None) -> None:
        """Before a backward pass: create masters of new parameters; make weights and masters agree."""
        self._adopt(chosen=chosen)
        self._follow()
        self._agree_on_flags()

    def _follow(self) -> None:
        """Make the values of weights and masters agree."""
        for pair in self.pairs.values():
            pair.sync()

    def _agree_on_flags(self) -> None:
        for pair in self.pairs.values():
            pair.agree_on_flags()

    def main_of(self, parameter: nn.Parameter) -> Tensor:
        """The parameter that the optimizer steps."""
        pair = self.pairs.get(id(parameter))
        return parameter if pair is None else pair.main

    def model_of(self, main: Tensor) -> Tensor:
        """The parameter that autograd writes."""
        return next((pair.model for pair in self.pairs.values() if pair.main is main), main)

    def pairs_of(self, o: int) -> list[Pair]:
        """The pairs in the groups of an optimizer."""
        mains = self._mains(o)
        by_main = {id(pair.main): pair for pair in self.pairs.values()}
        return [by_main.get(id(main)) or Pair(main, main) for main in mains]

    def grads_of(self, o: int) -> list[Tensor]:
        """The gradients that an optimizer would step."""
        return [main.grad for main in self._mains(o) if main.grad is not None]

    def values(self) -> dict[str, Tensor]:
        """The values of ``model.state_dict()``: float32 at levels that convert the model."""
        names = dict(self.model.named_parameters(remove_duplicate=False))
        state = dict(self.model.state_dict())
        for name, value in state.items():
            pair = self.pairs.get(id(names.get(name)))
            value = value if pair is None else pair.value()
            state[name] = value.detach().float() if value.dtype in LOW and self.widens else value.detach()
        return state

    def load_values(self, values: dict[str, Tensor], *, assign: bool = False) -> None:
        """Load :meth:`values`, as ``model.load_state_dict()`` does: masters take every digit."""
        self.model.load_state_dict(values, assign=assign)
        if self.stats is not None:
            # A skipped step restores the loaded statistics.
            self.stats = [buffer.clone() for buffer in self._statistics()]
        self._keep(values)
        names = dict(self.model.named_parameters(remove_duplicate=False))
        for name, value in values.items():
            pair = self.pairs.get(id(names.get(name)))
            if pair is not None and pair.model is not pair.main:
                pair.main.detach().copy_(value)
                pair.agree()

    def state(self) -> dict[str, Any]:
        """The whole state. Reading it changes nothing: weights and masters that do not agree yet stay as they are."""
        pairs = [pair for pair in self.pairs.values() if pair.model is not pair.main]
        before = [[side.clone() for side in pair.sides()] for pair in pairs]
        self._follow()
        state = copy.deepcopy(
            {
                "model": {k: v.detach() for k, v in self.model.state_dict().items()},
                "masters": {name: pair.main.detach() for name, pair in self._by_name()},
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scales": [vars(scale) for scale in self.scales],
                "counts": (self.micro, self.num_steps, self.num_skipped),
                "grads": {
                    name: grad for (name, _), grad in zip(self._managed(), self._window_grads(), strict=True)
                },
                "found": (self.found, self.found_by_loss, self.bad_losses),
                "window": (self.window, self.had_gradients),
                "stats": self.stats,
            }
        )
        for pair, values in zip(pairs, before, strict=True):
            for side, value in zip(pair.sides(), values, strict=True):
                if not same_bits(side, value):  # autograd counts every write, also of the same bits
                    side.copy_(value)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` gave."""
        self._follow()
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self._keep(state["masters"])
        states = list(map(_stepped, state["optimizers"]))
        self._keep_trained(states)
        for name, pair in self._by_name():
            pair.main.detach().copy_(state["masters"].get(name, pair.model.detach()))
            pair.agree()
        for o, saved in enumerate(states):
            self.optimizers[o].load_state_dict(saved)
            for i, main in enumerate(self._mains(o)):
                # torch casts scalars in the state, too, to the dtype of weights.
                numbers = {
                    k: v
                    for k, v in saved["state"].get(i, {}).items()
                    if isinstance(v, Tensor) and not v.dim()
                }
                if numbers:
                    self.optimizers[o].state[main].update(copy.deepcopy(numbers))
        for scale, saved in zip(self.scales, state["scales"], strict=True):
            vars(scale).update(saved)
        self.micro, self.num_steps, self.num_skipped = state["counts"]
        for name, main in self._managed():
            grad = state["grads"].get(name)
            if grad is not None and main.dtype in LOW and grad.dtype not in LOW:
                self._pair(self.model_of(main), main)
        self._adopt()
        for name, main in self._managed():
            self.model_of(main).grad = None
            # The gradient of a parameter that joined in the window has the low dtype of the parameter.
            grad = state["grads"].get(name)
            main.grad = None if grad is None else grad.to(main.dtype)
        self.found, self.found_by_loss, self.bad_losses = state["found"]
        self.window, self.had_gradients = state["window"]
        self.stats = state["stats"]
        # The gradients belong to the window, and no pass has checked them yet.
        self.left = [[] if self.grads_of(o) else None for o in range(len(self.optimizers))]
        self.members = [[] for _ in self.optimizers]

    def load_optimizers(self, states: Sequence[dict[str, Any]]) -> None:
        """``load_state_dict()`` of each optimizer; the state of frozen parameters stays float32."""
        self._keep_trained(states)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def structure(self) -> Structure | None:
        """Groups and trainable parameters; None if an optimizer has parameters that the model no longer has."""
        return structure_of(self)

    def restarted(self) -> Reference:
        """A new run, loaded with the state of this one."""
        structure = self.structure()
        if structure is None:
            return self
        fresh = Reference(self.config, structure)
        fresh.load(self.state())
        return fresh

    def copied(self) -> Reference:
        """An independent copy of the run. It has no hooks on optimizers, as in ``copy.deepcopy`` of an optimizer."""
        if self.structure() is None:
            return self
        self._follow()
        twin = copy.deepcopy(self)
        twin.pairs = {id(pair.model): pair for pair in twin.pairs.values()}
        for grad, (_, theirs) in zip(self._window_grads(), twin._managed(), strict=True):
            theirs.grad = grad
        twin._adopt()
        twin.members = [[] for _ in twin.optimizers]
        for o, left in enumerate(self.left):
            # Gradients edited since they were checked are checked again in the copy, too.
            if left is not None:
                twin.left[o] = twin._seen_grads(o) if left == self._seen_grads(o) else []
        return twin

    # Parts of the methods above.

    def _window_grads(self) -> list[Tensor | None]:
        """Copies of the open window's gradients, without those that a step has kept: they are not saved or copied."""
        kept = {id(main) for o, left in enumerate(self.left) if left is None for main in self._mains(o)}
        return [None if id(main) in kept else _or_none(main.grad) for _, main in self._managed()]

    def _convert(self, model: nn.Module) -> None:
        dtype = self.properties.cast_model_type or None
        exact = {id(p): p.detach().clone() for p in model.parameters()}
        if dtype is not None:
            for module in model.modules():
                if not self._is_kept(module):
                    for tensor in (*module._parameters.values(), *module._buffers.values()):
                        if tensor is not None and tensor.is_floating_point():
                            tensor.data = tensor.data.to(dtype)
            if dtype in LOW:
                for module in model.modules():
                    if self._is_kept(module) and not isinstance(module, _BatchNorm):
                        module.register_forward_pre_hook(
                            lambda _, args: tuple(_cast(a, torch.float32) for a in args)
                        )
                        module.register_forward_hook(lambda _, args, out: _cast(out, dtype))
            model.register_forward_pre_hook(lambda _, args: tuple(_cast(a, dtype) for a in args))
            model.register_forward_hook(lambda _, args, out: tuple(_cast(o, torch.float32) for o in out))
        for optimizer in () if self.properties.master_weights else self.optimizers:
            self._cast_state(optimizer)
        self._adopt(exact)

    def _cast_state(self, optimizer: Optimizer) -> None:
        """Cast the state of low-precision parameters to their dtype, as ``Optimizer.load_state_dict`` does."""
        for parameter, row in optimizer.state.items():
            for key, value in row.items():
                if isinstance(value, Tensor) and key not in ("step", "eta", "mu", "mu_product"):
                    row[key] = _cast(value, parameter.dtype)

    @property
    def sums_scaled(self) -> bool:
        """Whether the engine lets autograd sum the gradients of a window, which needs float32 weights."""
        cast = self.properties.cast_model_type
        return self.config.accumulate > 1 and self.config.losses == 1 and cast not in LOW

    def _is_kept(self, module: nn.Module) -> bool:
        if not self.properties.keep_batchnorm_fp32:
            return False
        if self.norm_rule == "batchnorm":
            return isinstance(module, _BatchNorm) and module.affine
        return isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm))

    def _adopt(
        self,
        exact: dict[int, Tensor] | None = None,
        *,
        chosen: Iterable[int] | None = None,
        joined: bool = False,
    ) -> None:
        """Create masters of low, trainable parameters in the groups. ``joined``: only in groups that have changed."""
        if not self.properties.master_weights:
            return
        known = {id(pair.main) for pair in self.pairs.values()}
        for o in range(len(self.optimizers)) if chosen is None else chosen:
            optimizer = self.optimizers[o]
            if joined and self.members[o] == list(map(id, self._mains(o))):
                continue
            for group in optimizer.param_groups:
                for i, parameter in enumerate(group["params"]):
                    if id(parameter) in known or parameter.dtype not in LOW:
                        continue
                    pair = self.pairs.get(id(parameter))
                    # A parameter prepared with optimizer state may have been trained: if frozen, it stays float32.
                    was_trained = exact is not None and parameter in optimizer.state
                    if pair is None and not (parameter.requires_grad or was_trained):
                        continue
                    if pair is None:
                        pair = self._pair(parameter, parameter if exact is None else exact[id(parameter)])
                    group["params"][i] = pair.main
                    known.add(id(pair.main))
                    if parameter.grad is not None:
                        pair.main.grad, parameter.grad = parameter.grad.float(), None
                    if parameter in optimizer.state:
                        row = optimizer.state.pop(parameter)
                        optimizer.state[pair.main] = {k: _cast(v, torch.float32) for k, v in row.items()}
            self.members[o] = list(map(id, self._mains(o)))

    def _pair(self, parameter: nn.Parameter, value: Tensor) -> Pair:
        master = value.detach().float().clone().requires_grad_(parameter.requires_grad)
        pair = self.pairs[id(parameter)] = Pair(parameter, master)
        return pair

    def _keep(self, values: dict[str, Tensor]) -> None:
        """Create masters of frozen parameters in the groups whose dtype cannot hold the loaded values."""
        if not self.properties.master_weights:
            return
        members = {
            id(p)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        names = dict(self.model.named_parameters(remove_duplicate=False))
        for name, value in values.items():
            parameter = names.get(name)
            if parameter is None or id(parameter) not in members or parameter.dtype not in LOW:
                continue
            if not torch.equal(value.to(parameter.dtype).to(value.dtype), value):
                self._pair(parameter, value)

    def _keep_trained(self, states: Sequence[dict[str, Any]]) -> None:
        """Create masters of low parameters with optimizer state, which torch would cast to their dtype."""
        for optimizer, state in zip(self.optimizers, states, strict=True):
            for i, main in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                if self.properties.master_weights and i in state["state"] and main.dtype in LOW:
                    self._pair(main, main)
        self._adopt()

    def _recheck(self, o: int) -> None:
        """Check gradients again that user code has edited since the last check, before more are added."""
        if not self.left[o]:
            self._look_at_unseen(o)
        elif self.left[o] != self._seen_grads(o):
            self.found[o] = not all(bool(grad.isfinite().all()) for grad in self.grads_of(o))

    def _look_at_unseen(self, o: int) -> None:
        """Check gradients that no pass of this optimizer has computed, such as old ones of a group that joined."""
        self.found[o] = self.found[o] or not all(bool(grad.isfinite().all()) for grad in self.grads_of(o))

    def _seen_grads(self, o: int) -> list[tuple[int, int]]:
        return [(id(main.grad), -1 if main.grad is None else main.grad._version) for main in self._mains(o)]

    def _clip(self, grads: list[Tensor]) -> float | None:
        if self.config.clip is None:
            return None
        kind, limit = self.config.clip
        if kind == "value":
            for grad in grads:
                grad.clamp_(-limit, limit)
            return None
        # In float32 whatever their dtype, like all arithmetic on gradients.
        filled = [grad.float() for grad in grads if grad.numel()]
        if not filled:
            return 0.0
        norms = torch._foreach_norm(filled)
        norm = torch.linalg.vector_norm(torch.stack(list(norms)))
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.copy_(grad.float() * factor)
        return float(norm)

    def _end(self, chosen: Iterable[int], found: bool, *, counts: bool = True, keep: bool = False) -> None:
        """End the window. ``counts``: a gradient exists, so it is a step or a skip. ``keep``: gradients stay."""
        self.micro += 1
        self.num_skipped += found and counts
        self.num_steps += not found and counts
        if found:
            for buffer, saved in zip(self._statistics(), self.stats or (), strict=False):
                buffer.copy_(saved)
        self.stats = None
        self._update_scales()
        for o in chosen:
            self._drop(o, keep=keep)

    def _update_scales(self) -> None:
        for loss_id, found_inf in self.found_by_loss.items():
            self.scales[loss_id].update(found_inf, of_loss=loss_id in self.bad_losses)
        self.found_by_loss, self.bad_losses = {}, set()

    def _drop(self, o: int, *, keep: bool = False) -> None:
        """Drop the gradients. ``keep``: only those that masters have."""
        for pair in self.pairs_of(o):
            if not (keep and pair.model is pair.main):
                pair.main.grad = pair.model.grad = None
        self.found[o], self.left[o], self.window = False, None, "empty"

    def _forget(self) -> None:
        # "scaled": the engine lets autograd sum the passes of the window; "read": its gradients are unscaled.
        self.window, self.had_gradients = "empty", False
        self.found = [False] * len(self.optimizers)
        self.waiting: list[Tensor] = []
        self.found_by_loss: dict[int, bool] = {}
        self.bad_losses = set[int]()
        self.left: list[list[tuple[int, int]] | None] = [None] * len(self.optimizers)

    def _statistics(self) -> Iterator[Tensor]:
        if self.restore:
            for module in self.model.modules():
                if isinstance(module, _NormBase):
                    yield from module.buffers(recurse=False)

    def _by_name(self) -> Iterator[tuple[str, Pair]]:
        for name, parameter in self.model.named_parameters():
            if id(parameter) in self.pairs:
                yield name, self.pairs[id(parameter)]

    def _managed(self) -> list[tuple[str, Tensor]]:
        """The parameters that the optimizers step, with their names in the model."""
        stepped = {id(main) for o in range(len(self.optimizers)) for main in self._mains(o)}
        named = [(name, self.main_of(parameter)) for name, parameter in self.model.named_parameters()]
        return [(name, main) for name, main in named if id(main) in stepped]


def critic() -> nn.Module:
    """The other network, whose input is a loss."""
    net = nn.Linear(1, 1)
    nn.init.constant_(net.weight, 0.5)
    nn.init.constant_(net.bias, 0.0)
    return net


class Structure(NamedTuple):
    """What a restarted script must set up as before: groups, by name, and which parameters are trainable."""

    groups: list[list[list[str]]]
    trainable: dict[str, bool]

    def freeze(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.trainable[name])

    def optimizers(self, config: Config, model: nn.Module) -> list[Optimizer]:
        named = dict(model.named_parameters())
        made: list[Optimizer] = []
        for kind, groups in zip(config.optimizers, self.groups, strict=True):
            optimizer = OPTIMIZERS[kind]([named[name] for name in groups[0]])
            for names in groups[1:]:
                optimizer.add_param_group({"params": [named[name] for name in names]})
            made.append(optimizer)
        return made


def first_structure(config: Config, model: nn.Module) -> Structure:
    """Deal the parameters in turn to the optimizers, and in each optimizer to its groups."""
    names = [name for name, _ in model.named_parameters()]
    if config.held_out:
        names = [name for i, name in enumerate(names) if i % 3 != 1]
    n = len(config.optimizers)
    own = [names[o::n] for o in range(n)]
    groups = [[part for g in range(config.groups) if (part := some[g :: config.groups])] for some in own]
    return Structure(groups, {name: p.requires_grad for name, p in model.named_parameters()})


def structure_of(run: Any) -> Structure | None:
    """The present structure of a run; None if an optimizer has parameters that the model no longer has."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    stepped = [
        main for optimizer in run.optimizers for group in optimizer.param_groups for main in group["params"]
    ]
    if any(id(run.model_of(main)) not in names for main in stepped):
        return None
    groups = [
        [[names[id(run.model_of(main))] for main in group["params"]] for group in optimizer.param_groups]
        for optimizer in run.optimizers
    ]
    return Structure(groups, {name: p.requires_grad for name, p in run.model.named_parameters()})


def losses_of(config: Config, model: Callable[..., tuple[Tensor, ...]], at: int) -> list[Tensor]:
    """One loss per loss scaler."""
    torch.default_generator.manual_seed(config.seed + at)  # dropout
    x, ids, target = models.batch(1000 * config.seed + at)
    outputs = model(x, ids)
    losses = [nn.functional.mse_loss(output.float(), target * (i + 1)) for i, output in enumerate(outputs)]
    return losses if config.losses > 1 else [torch.stack(losses).sum()]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _stepped(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state without the rows of parameters that were never stepped, which it creates by itself."""
    return {**state, "state": {i: row for i, row in state["state"].items() if float(row.get("step", 1))}}


def _or_none(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().clone()
