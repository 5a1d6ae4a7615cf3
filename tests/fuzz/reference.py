"""The other side of the comparison: mixed precision by hand, in plain torch.

Of halfpeak it uses the table of levels (:mod:`halfpeak.core.levels`) and, at O1 and O4, the scope of casts, because the
fuzzer tests orders of calls and not the dtypes of single operations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
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


class Note(NamedTuple):
    """What the passes of a loss have found in the gradients of an optimizer.

    Attributes:
        found: 0, 1 if a gradient was not finite, 0.5 if the loss itself was not.
        first: the scale in the first of these passes.
        counts: whether a clean step counts for the loss.
    """

    found: float
    first: float
    counts: bool = True

    def joined(self, other: Note) -> Note:
        """The same for two optimizers that step together."""
        return Note(max(self.found, other.found), max(self.first, other.first), self.counts or other.counts)


class Scale:
    """The loss scale of one loss, in plain numbers, written from the documentation of :class:`halfpeak.ScaleConfig`."""

    def __init__(self, config: Config, properties: Properties) -> None:
        self.rule = config.scale_config
        self.dynamic = properties.loss_scale == "dynamic"
        start = min(self.rule.init, self.rule.ceiling)
        self.scale = start if self.dynamic else float(properties.loss_scale)
        self.clean, self.left, self.stuck = 0, self.rule.hysteresis, 0

    @property
    def is_unit(self) -> bool:
        """Whether the scale is always 1."""
        return not self.dynamic and self.scale == 1

    def update(self, found_inf: float) -> None:
        """Follow one step; 0.5: the loss itself was not finite."""
        rule, recovers = self.rule, self.rule.recovers and self.dynamic
        if recovers and found_inf == 0.5:
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
    """A model parameter and its main parameter, maybe one tensor. The gradient is that of the main parameter."""

    def __init__(self, model: nn.Parameter, main: Tensor) -> None:
        self.model, self.main = model, main
        self.trainable = main.requires_grad
        self.record()

    def follow(self) -> None:
        """Before a pass and a step: a master keeps its digits where it still rounds to a weight that was written."""
        if self.model is not self.main and self.model._version != self.seen[0]:
            was_written = self.main._version != self.seen[1]
            self.main.detach().copy_(self.merged())
            self.seen = self.model._version, self.seen[1] if was_written else self.main._version

    def publish_written(self) -> None:
        """Before a forward pass and a step."""
        if self.main._version != self.seen[1] and self.model._version == self.seen[0]:
            self.publish()

    def publish(self) -> None:
        if self.model is not self.main:
            self.model.detach().copy_(self.main.detach())
            self.record()

    def merged(self) -> Tensor:
        model, main = self.model.detach(), self.main.detach()
        return torch.where(main.to(model.dtype) == model, main, model.float())

    def value(self) -> Tensor:
        """The value of both sides: the main parameter, or a weight that was written, with the digits its master still has."""
        if self.model._version == self.seen[0]:
            return self.main.detach()
        return self.merged()

    def agree_on_flags(self) -> None:
        """Copy ``requires_grad`` from the side on which it was changed."""
        changed = self.model if self.model.requires_grad != self.trainable else self.main
        self.trainable = changed.requires_grad
        self.model.requires_grad_(self.trainable)
        self.main.requires_grad_(self.trainable)

    def record(self) -> None:
        self.seen = self.model._version, self.main._version


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


class Reference:
    """One run by hand, with the methods of :class:`fuzz.subject.Subject`."""

    def __init__(self, config: Config, like: Structure | None = None) -> None:
        self.config = config
        options = dict(config.options)
        self.op_lists = options.pop("op_lists", "torch")
        self.norm_rule = options.pop("norms", "all")
        self.restore = options.pop("restore_buffers", True)
        self.properties = resolve(config.level, **options)
        self.model = models.build(config.parts, config.heads, config.seed)
        structure = like or first_structure(config, self.model)
        structure.freeze(self.model)
        self.optimizers = structure.optimizers(config, self.model)
        self.pairs: dict[int, Pair] = {}
        # By loss, what the passes since its last step have found in the gradients of each optimizer.
        self.notes: list[dict[Any, Note]] = [{} for _ in self.optimizers]
        self._convert(self.model)
        # At levels that convert the model, its state_dict() is float32.
        self.widens = self.properties.cast_model_type not in (None, False)
        self.keep: dict[str, Any] = {}
        self.scales = [Scale(config, self.properties) for _ in range(config.losses)]
        self.micro = self.num_steps = self.num_skipped = 0
        self.stats: list[Tensor] | None = None

    # The interface for events.

    def forward(self, at: int) -> list[Tensor]:
        """The losses of iteration ``at``, one per loss scaler."""
        if self.stats is None and torch.is_grad_enabled():
            self.stats = [buffer.clone() for buffer in self._statistics()]
        with self.casts():
            return losses_of(self.config, self.model, at)

    def casts(self) -> AbstractContextManager[Any]:
        """The casts of a forward pass, before which masters reach weights, and both agree on ``requires_grad``."""
        self._adopt()
        for pair in self.pairs.values():
            pair.publish_written()
            pair.agree_on_flags()
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
        scale = self.scales[loss_id]
        if self.config.accumulate > 1:
            loss = loss / self.config.accumulate
        chosen = range(len(self.optimizers)) if optimizers is None else optimizers
        bad_loss = scale.rule.recovers and scale.dynamic and not bool(loss.isfinite())
        self._pass(loss, scale, loss_id, chosen, retain=retain, bad_loss=bad_loss)

    def _pass(
        self,
        loss: Tensor,
        scale: Scale,
        name: Any,
        chosen: Sequence[int],
        *,
        retain: bool = False,
        bad_loss: bool = False,
    ) -> None:
        self.sync()
        owner = {id(pair.model): o for o in range(len(self.optimizers)) for pair in self.pairs_of(o)}
        # A scale of 1 leaves autograd what no optimizer steps, also in a pass that raises.
        every = [p for p in self.model.parameters() if not scale.is_unit or id(p) in owner]
        earlier = [self.main_of(parameter).grad for parameter in every]
        # At a scale of 1 autograd adds to the gradients that are there; else they are set apart.
        begun = [
            grad if scale.is_unit and owner[id(parameter)] in chosen else None
            for parameter, grad in zip(every, earlier, strict=True)
        ]
        versions = [None if grad is None else grad._version for grad in begun]
        for parameter, grad in zip(every, begun, strict=True):
            parameter.grad = grad
        lost = False
        try:
            # Recomputation in the backward pass needs the same casts; torch.autocast restores its own.
            with self.recasts():
                (loss.float() * scale.scale).backward(retain_graph=retain)
        except BaseException:
            lost = any(
                grad is not None and grad._version != version
                for grad, version in zip(begun, versions, strict=True)
            )
            raise
        finally:
            fresh = [parameter.grad for parameter in every]
            for parameter, grad in zip(every, earlier, strict=True):
                parameter.grad, self.main_of(parameter).grad = None, grad
            if lost:
                self._restart_window(range(len(self.optimizers)))
        found: dict[int, bool] = {}
        for k, (parameter, grad) in enumerate(zip(every, fresh, strict=True)):
            o, main = owner.get(id(parameter)), self.main_of(parameter)
            if grad is None or (o is not None and o not in chosen):
                continue
            if begun[k] is not None:  # nobody looks at it before the step
                main.grad = grad
                if o is not None and grad._version != versions[k]:
                    found.setdefault(o, False)
                continue
            unscaled = (grad.float() / scale.scale).to(main.dtype)
            if o is not None:
                is_seen = not scale.is_unit or grad.dtype != main.dtype
                found[o] = found.get(o, False) or (is_seen and not bool(unscaled.isfinite().all()))
            main.grad = unscaled if main.grad is None else main.grad.add_(unscaled)
        for o, is_bad in found.items():
            before = self.notes[o].get(name, Note(0, scale.scale))
            value = 0.5 if bad_loss else float(is_bad)
            self.notes[o][name] = Note(max(before.found, value), before.first)

    def recasts(self) -> AbstractContextManager[Any]:
        if not self.properties.patch_torch_functions or self.op_lists != "apex":
            return nullcontext()
        assert self.properties.patch_torch_functions_type is not None
        return OpCasts(self.properties.patch_torch_functions_type)

    def critic_step(self, at: int) -> None:
        """Another network, trained by a loss that reaches this one."""
        if "critic" not in self.keep:
            net = critic()
            self.keep["critic"] = net, torch.optim.SGD(net.parameters(), lr=0.1)
            self.keep["critic scale"] = Scale(self.config, resolve("O0", loss_scale=64.0))
        net, optimizer = self.keep["critic"]
        loss = net(sum(self.forward(at)).view(1, 1)).sum()
        self._pass(loss, self.keep["critic scale"], "critic", range(len(self.optimizers)))
        if all(bool(p.grad.isfinite().all()) for p in net.parameters()):
            for p in net.parameters():
                p.grad /= 64.0
            optimizer.step()
        optimizer.zero_grad()

    def step(self, optimizers: Sequence[int] | None = None) -> Result:
        """Clip, then step or skip."""
        if (self.micro + 1) % self.config.accumulate:
            self.micro += 1
            return Result(False, scale=self.scales[0].scale)
        chosen = range(len(self.optimizers)) if optimizers is None else optimizers
        self.sync()
        for pair in self.pairs.values():
            pair.publish_written()
        grads = list({id(g): g for o in chosen for g in self.grads_of(o)}.values())
        found = any(self.is_bad(o) for o in chosen)
        norm = self._norm(grads)
        found = found or (norm is not None and not math.isfinite(norm))
        if not found:
            self._clip(grads, norm)
        for o in chosen if found else ():
            self._lay_out(self.optimizers[o])
            for main in self._mains(o):
                main.grad = None
        notes = self._notes_of(chosen)
        try:
            # Called without gradients, too: nothing moves, but hooks and schedules see a step.
            for o in chosen:
                self._call(o)
        except BaseException:
            self.abort(chosen)
            raise
        self._end(chosen, found, notes, counts=bool(grads))
        if found and any(self.scales[name].is_exhausted for name in notes if name != "critic"):
            raise Collapse
        return Result(True, found, self.scales[0].scale, norm)

    def is_bad(self, o: int) -> bool:
        """Whether an optimizer would step a gradient that is not finite, or was not when a pass has checked it."""
        grads = self.grads_of(o)
        noted = any(note.found for note in self.notes[o].values())
        return bool(grads) and (noted or not all(bool(grad.isfinite().all()) for grad in grads))

    def _notes_of(self, chosen: Iterable[int]) -> dict[Any, Note]:
        """What is known of the losses that have left something in the gradients of some optimizers."""
        notes: dict[Any, Note] = {}
        for o in chosen:
            for name, note in self.notes[o].items():
                notes[name] = note if name not in notes else notes[name].joined(note)
        return notes

    def _moves(self, notes: dict[Any, Note], found: bool) -> dict[int, float]:
        """By loss, what its scale follows: nothing, an overflow, or a loss that is not finite."""
        explained = any(note.found for note in notes.values())
        moves: dict[int, float] = {}
        for name, note in notes.items():
            value = 0.0 if not found else note.found if explained else 1.0
            # A smaller scale than that of the first pass has answered the overflow already.
            if name != "critic" and (self.scales[name].scale >= note.first if value else note.counts):
                moves[name] = value
        return moves

    def _lay_out(self, optimizer: Optimizer) -> None:
        """Measure the gradients, as a skipped fused step does: the first measurement lays out the flat buffers."""
        hooks = optimizer._optimizer_step_pre_hooks
        by_value = self.config.clip is not None and self.config.clip[0] == "value"
        if isinstance(optimizer, FusedOptimizer) and self.config.is_fused and not hooks and not by_value:
            mains = params_of(optimizer)
            optimizer.measure(StepInputs([main.grad for main in mains], mains, torch.ones(())))

    def _call(self, o: int, *closure: Callable[[], None]) -> None:
        """Call ``optimizer.step()`` and round its masters into the weights, however it ends."""
        try:
            self.optimizers[o].step(*closure)
        finally:
            for pair in self.pairs_of(o):
                pair.publish()

    def _mains(self, o: int) -> list[Tensor]:
        return [p for group in self.optimizers[o].param_groups for p in group["params"]]

    def step_with_closure(self, at: int) -> None:
        """Evaluate until the gradients are finite, then step. Gradients that were there have overflowed, or are dropped."""
        self.sync()
        if self.is_bad(0):
            self.step()
            return

        def evaluate() -> None:
            while True:
                self._drop(0)
                for pair in self.pairs_of(0):
                    pair.publish()
                for loss_id, loss in enumerate(self.forward(at)):
                    self.backward(loss, loss_id, retain=True)
                if not self.is_bad(0):
                    break
                for buffer, saved in zip(self._statistics(), self.stats or (), strict=False):
                    buffer.copy_(saved)
                used = [self.scales[name] for name in self.notes[0] if name != "critic"]
                for loss_id, number in self._moves(self.notes[0], True).items():
                    if number:
                        self.scales[loss_id].update(number)
                self.stats = None
                if not any(scale.dynamic for scale in used) or any(scale.is_exhausted for scale in used):
                    self._call_failed(0)
                    raise Collapse
            grads = self.grads_of(0)
            self._clip(grads, self._norm(grads))

        self._call(0, torch.enable_grad()(evaluate))
        self._end([0], False, self.notes[0])

    def _call_failed(self, o: int) -> None:
        self.abort([o])

    def zero_model(self, *, set_to_none: bool = True) -> None:
        """``model.zero_grad()``, which also drops the gradients that masters have."""
        for parameter in self.model.parameters():
            main = self.main_of(parameter)
            if set_to_none or main.grad is None:
                main.grad = None
            else:
                main.grad.detach_().zero_()

    def holder_of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that has the gradient of a parameter of the model."""
        return self.main_of(parameter)

    def look(self) -> None:
        """Do nothing: the subject reads properties of its engine."""

    def other_engine(self, level: str) -> None:
        """The subject steps an engine of another model, whose passes look at the gradients of all engines."""
        self._settle()

    def unscale(self) -> None:
        """Let masters follow written weights; gradients are never scaled here."""
        self.sync()

    def settle(self) -> None:
        """:meth:`unscale` where the subject calls it."""
        if not self.config.is_fused:
            self.sync()

    def abort(self, optimizers: Iterable[int] | None = None) -> None:
        """Drop the window."""
        self.sync()
        for pair in self.pairs.values():
            pair.publish_written()
        self._restart_window(range(len(self.optimizers)) if optimizers is None else optimizers)

    def _restart_window(self, optimizers: Iterable[int]) -> None:
        self.micro -= self.micro % self.config.accumulate
        for o in optimizers:
            self._drop(o)

    def sync(self) -> None:
        """Before a backward pass: create masters of new parameters, which follow weights that were written."""
        self._adopt()
        for pair in self.pairs.values():
            pair.follow()
            pair.agree_on_flags()
        self._settle()

    def main_of(self, parameter: nn.Parameter) -> Tensor:
        """The parameter that the optimizer steps."""
        pair = self.pairs.get(id(parameter))
        return parameter if pair is None else pair.main

    def model_of(self, main: Tensor) -> Tensor:
        """The parameter that autograd writes."""
        return next((pair.model for pair in self.pairs.values() if pair.main is main), main)

    def pairs_of(self, o: int) -> list[Pair]:
        """The pairs in the groups of an optimizer."""
        by_main = {id(pair.main): pair for pair in self.pairs.values()}
        return [by_main.get(id(main)) or Pair(main, main) for main in self._mains(o)]

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
        names = dict(self.model.named_parameters(remove_duplicate=False))
        for name, value in values.items():
            pair = self.pairs.get(id(names.get(name)))
            if pair is not None and pair.model is not pair.main:
                pair.main.detach().copy_(value)
                pair.seen = pair.seen[0], pair.main._version

    def state(self) -> dict[str, Any]:
        """The whole state. Reading it lets masters follow written weights, and changes nothing else."""
        self.sync()
        return copy.deepcopy(
            {
                "model": {k: v.detach() for k, v in self.model.state_dict().items()},
                "masters": {name: pair.value() for name, pair in self._by_name()},
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scales": [vars(scale) for scale in self.scales],
                "counts": (self.micro, self.num_steps, self.num_skipped),
                "grads": {name: main.grad for name, main in self._managed() if main.grad is not None},
                "notes": self.notes,
                "stats": self.stats,
            }
        )

    def load(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` gave."""
        state = copy.deepcopy(state)
        self._adopt()
        self.model.load_state_dict(state["model"])
        for name, pair in self._by_name():
            pair.main.detach().copy_(state["masters"].get(name, pair.model.detach()))
            pair.publish()
        for optimizer, saved in zip(self.optimizers, map(_stepped, state["optimizers"]), strict=True):
            optimizer.load_state_dict(saved)
            for i, main in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                # torch casts scalars in the state, too, to the dtype of weights.
                row = saved["state"].get(i, {})
                numbers = {k: v for k, v in row.items() if isinstance(v, Tensor) and not v.dim()}
                if numbers:
                    optimizer.state[main].update(copy.deepcopy(numbers))
        for scale, saved in zip(self.scales, state["scales"], strict=True):
            vars(scale).update(saved)
        self.micro, self.num_steps, self.num_skipped = state["counts"]
        for name, main in self._managed():
            grad = state["grads"].get(name)
            main.grad = None if grad is None else grad.to(main.dtype)
        self.notes, self.stats = state["notes"], state["stats"]

    def load_optimizers(self, states: Sequence[dict[str, Any]]) -> None:
        """``load_state_dict()`` of each optimizer."""
        self._adopt()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def structure(self) -> Structure | None:
        """Groups and trainable parameters; None if an optimizer has parameters that the model no longer has."""
        return structure_of(self)

    def restarted(self) -> Reference:
        """A new run, loaded with the state of this one."""
        for pair in self.pairs.values():
            pair.agree_on_flags()
        structure = self.structure()
        if structure is None:
            return self
        fresh = Reference(self.config, structure)
        fresh.load(self.state())
        return fresh

    # Parts of the methods above.

    def _convert(self, model: nn.Module) -> None:
        dtype = self.properties.cast_model_type or None
        exact = {id(p): p.detach().clone() for p in model.parameters()}
        if dtype is not None:
            for module in model.modules():
                if not self._is_kept(module):
                    for tensor in (*module._parameters.values(), *module._buffers.values()):
                        if tensor is not None and tensor.is_floating_point():
                            tensor.data = tensor.data.to(dtype)
            given: list[tuple[Any, Any]] = []  # what the model got, each as it is cast and as it was

            def cast_inputs(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                given[:] = [(_cast(one, dtype), one) for one in args]
                return tuple(low for low, _ in given)

            def as_given(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                exact = (next((was for low, was in given if low is one), one) for one in args)
                return tuple(_cast(one, torch.float32) for one in exact)

            if dtype in LOW:
                for module in model.modules():
                    if self._is_kept(module) and not isinstance(module, _BatchNorm):
                        module.register_forward_pre_hook(as_given)
                        module.register_forward_hook(lambda _, args, out: _cast(out, dtype))
            model.register_forward_pre_hook(cast_inputs)
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

    def _is_kept(self, module: nn.Module) -> bool:
        if not self.properties.keep_batchnorm_fp32:
            return False
        if self.norm_rule == "batchnorm":
            return isinstance(module, _BatchNorm) and module.affine
        return isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm))

    def _adopt(self, exact: dict[int, Tensor] | None = None) -> None:
        """Put a master in the place of each low-precision parameter in the groups."""
        for optimizer in self.optimizers if self.properties.master_weights else ():
            for group in optimizer.param_groups:
                for i, parameter in enumerate(group["params"]):
                    if parameter.dtype not in LOW:
                        continue
                    pair = self.pairs.get(id(parameter))
                    if pair is None:
                        value = parameter if exact is None else exact[id(parameter)]
                        master = value.detach().float().clone().requires_grad_(parameter.requires_grad)
                        pair = self.pairs[id(parameter)] = Pair(parameter, master)
                        # Some kernels (recurrent layers on the CPU) compute float32 gradients of bfloat16 weights.
                        grad, parameter.grad = parameter.grad, None
                        parameter.grad_dtype, parameter.grad = None, grad
                    group["params"][i] = pair.main
                    if parameter.grad is not None:
                        pair.main.grad, parameter.grad = parameter.grad.float(), None
                    if parameter in optimizer.state:
                        row = optimizer.state.pop(parameter)
                        optimizer.state[pair.main] = {k: _cast(v, torch.float32) for k, v in row.items()}

    def _settle(self) -> None:
        """What passes have found is forgotten with their gradients, and where all are zero."""
        for o in range(len(self.optimizers)):
            grads = self.grads_of(o)
            if not grads:
                self.notes[o] = {}
            elif not any(bool(grad.any()) for grad in grads):
                self.notes[o] = {name: note._replace(found=0) for name, note in self.notes[o].items()}

    def _norm(self, grads: Sequence[Tensor]) -> float | None:
        """The norm of all gradients, in float32 like all arithmetic on gradients; None if the clip needs none."""
        if self.config.clip is None or self.config.clip[0] == "value":
            return None
        filled = [grad.float() for grad in grads if grad.numel()]
        return (
            float(torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(filled))))) if filled else 0.0
        )

    def _clip(self, grads: Sequence[Tensor], norm: float | None) -> None:
        if self.config.clip is None:
            return
        kind, limit = self.config.clip
        for grad in grads:
            if kind == "value":
                grad.clamp_(-limit, limit)
            else:
                grad.copy_(grad.float() * torch.clamp(limit / (torch.tensor(norm) + 1e-6), max=1.0))

    def _end(
        self, chosen: Iterable[int], found: bool, notes: dict[Any, Note], *, counts: bool = True
    ) -> None:
        """End the window. ``counts``: a gradient existed, so it is a step or a skip."""
        self.micro += 1
        self.num_skipped += found and counts
        self.num_steps += not found and counts
        if found:
            for buffer, saved in zip(self._statistics(), self.stats or (), strict=False):
                buffer.copy_(saved)
        self.stats = None
        for loss_id, number in self._moves(notes, found).items():
            self.scales[loss_id].update(number)
        for o in chosen:
            self._drop(o)
        # A loss counts in the first of the steps that its passes have reached.
        self.notes = [
            {name: note._replace(counts=note.counts and name not in notes) for name, note in of_one.items()}
            for of_one in self.notes
        ]

    def _drop(self, o: int) -> None:
        """Drop the gradients."""
        for pair in self.pairs_of(o):
            pair.main.grad = pair.model.grad = None
        self.notes[o] = {}

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
