"""The running statistics of batch and instance norms, put back when a step is skipped.

An overflow in the forward pass reaches the running statistics before anybody knows that the step will be skipped, and
evaluation is ruined from then on (pytorch/pytorch#88474, #90342).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy


class BatchNormBuffers:
    """Keeps a copy of every running statistic of some models and settles it after each step: taken forward, or put back.

    What a skipped step goes back to are the statistics before its first forward pass, also where somebody else wrote them
    after the last step: a loaded checkpoint, ``update_bn``. A step settles the models whose parameters its optimizers
    have: a discriminator's skip does not take from the generator what it has just seen. Statistics of other models that a
    skipped step left infinite are put back as well.

    A few launches per (model, device, dtype) and no wait for the device, whatever the number of layers.

    Args:
        modules: the models whose batch norms, and instance norms that track statistics, are looked after.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._models: list[_OfModel] = []
        for module in modules:
            self.watch(module)

    def watch(self, module: nn.Module) -> None:
        """Look after the norms of one more model, from its statistics as they are now."""
        known = {id(norm) for model in self._models for norm in model.norms}
        self._models.append(_OfModel(module, [norm for norm in norms_of(module) if id(norm) not in known]))

    def save(self) -> None:
        """Remember the statistics as they are now."""
        for model in self._models:
            model.save()

    def begin(self) -> None:
        """Before a forward pass with gradients, the first since a step: what was written since that step is kept."""
        for model in self._models:
            model.begin()

    def note_begun(self) -> None:
        """A forward pass has begun where :meth:`begin` was not called, from the statistics that were saved."""
        for model in self._models:
            model.note_begun()

    def reload(self) -> None:
        """After a checkpoint was loaded: a skipped step must not put back what was there before it."""
        for model in self._models:
            model.reload()

    def touched_by(self, parameters: Iterable[Tensor]) -> frozenset[int]:
        """The numbers of the models that have one of the parameters."""
        wanted = {id(parameter) for parameter in parameters}
        return frozenset(number for number, model in enumerate(self._models) if model.has_any(wanted))

    def settle(self, found_inf: Tensor | bool, touched: frozenset[int] | None = None) -> None:
        """After a step: keep the new statistics if it was clean, else put back the saved ones.

        Args:
            found_inf: a scalar on the device, which is not waited for, or a bool where the host knows already.
            touched: which models the step was of (:meth:`touched_by`); None means all.
        """
        for number, model in enumerate(self._models):
            if touched is None or number in touched:
                model.settle(found_inf)
            else:
                model.rescue(found_inf)

    def live(self) -> list[Tensor]:
        """The statistics themselves."""
        return [buffer for model in self._models for buffer in model.live()]

    def saved(self) -> list[Tensor]:
        """What :meth:`save` remembered: one flat tensor per (model, device, dtype), in the order of the layers."""
        return [flat for model in self._models for flat in model.saved()]

    def hold(self, saved: Sequence[Tensor]) -> None:
        """Remember the statistics in these very tensors, of the form that :meth:`saved` gives."""
        rest = iter(saved)
        for model in self._models:
            model.hold(rest)

    def put_saved(self, saved: Sequence[Tensor]) -> None:
        """Restore what :meth:`saved` gave; what does not fit is replaced by the statistics as they are now.

        It holds until the next step, whether the model is loaded before or afterwards.
        """
        rest = list(saved)
        for model in self._models:
            count = model.put_saved(rest)
            del rest[:count]


class _OfModel:
    """The statistics of one model."""

    def __init__(self, module: nn.Module, norms: list[nn.Module]) -> None:
        self.norms = norms
        self._module = module
        self._saved: dict[_Key, Tensor] = {}
        self._marks: list[tuple[int, int]] = []
        self._has_begun = False
        self._was_given = False
        self.save()

    def has_any(self, parameters: set[int]) -> bool:
        return any(id(parameter) in parameters for parameter in self._module.parameters())

    def save(self) -> None:
        self._saved = {key: _flat(live) for key, live in self._live().items()}
        self._marks = self._read_marks()

    def begin(self) -> None:
        if torch.is_grad_enabled() and not self._has_begun:
            self._has_begun = True
            if self._marks != self._read_marks():
                self.save()

    def note_begun(self) -> None:
        self._has_begun = True

    def reload(self) -> None:
        if not self._was_given:
            self.save()

    def settle(self, found_inf: Tensor | bool) -> None:
        if found_inf is not False:
            for live, saved in self._pairs():
                _put_back(live, saved, found_inf)
        self.save()
        self._has_begun = self._was_given = False

    def rescue(self, found_inf: Tensor | bool) -> None:
        """After a step of other models: put back what it left infinite, if it was skipped."""
        if found_inf is not False:
            for live, saved in self._pairs():
                lost = ~torch.isfinite(_flat(live)).all()
                skipped = lost if found_inf is True else lost & (found_inf.to(lost.device) != 0)
                _put_back(live, saved, skipped)

    def live(self) -> list[Tensor]:
        return [buffer for live in self._live().values() for buffer in live]

    def saved(self) -> list[Tensor]:
        return [self._saved[key] for key in self._live() if key in self._saved]

    def hold(self, saved: Iterator[Tensor]) -> None:
        self._saved.update({key: next(saved) for key in self._live() if key in self._saved})

    def put_saved(self, saved: Sequence[Tensor]) -> int:
        """Take as many of ``saved`` as this model has; returns how many these are."""
        self.save()
        self._has_begun = self._was_given = True
        for key, flat in zip(list(self._saved), saved, strict=False):
            if flat.shape == self._saved[key].shape:
                self._saved[key] = flat.to(key[0], key[1], copy=True)
        return len(self._saved)

    def _pairs(self) -> list[tuple[list[Tensor], Tensor]]:
        """What is live and what it was, where the one still fits the other."""
        pairs = [(live, self._saved.get(key)) for key, live in self._live().items()]
        return [
            (live, saved)
            for live, saved in pairs
            if saved is not None and saved.numel() == sum(buffer.numel() for buffer in live)
        ]

    def _read_marks(self) -> list[tuple[int, int]]:
        return [(tensor._version, tensor.data_ptr()) for live in self._live().values() for tensor in live]

    def _live(self) -> dict[_Key, list[Tensor]]:
        live: dict[_Key, list[Tensor]] = {}
        for norm in self.norms:
            for buffer in norm.buffers(recurse=False):
                if not is_lazy(buffer):
                    live.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        return live


_Key = tuple[torch.device, torch.dtype]


def norms_of(module: nn.Module) -> list[nn.Module]:
    """The layers of ``module`` that may hold running statistics."""
    return [layer for layer in module.modules() if isinstance(layer, _NormBase)]


def _put_back(live: list[Tensor], saved: Tensor, found_inf: Tensor | bool) -> None:
    if isinstance(found_inf, Tensor):
        saved = torch.where(found_inf.to(saved.device) != 0, saved, _flat(live))
    parts = saved.split([buffer.numel() for buffer in live])
    # Through .data, which counts no version, as the kernels do that write them: a forward pass may still await its
    # backward pass, such as the generator's when the discriminator's step is skipped.
    torch._foreach_copy_(
        [buffer.data for buffer in live],
        [part.view_as(buffer) for part, buffer in zip(parts, live, strict=True)],
    )


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
