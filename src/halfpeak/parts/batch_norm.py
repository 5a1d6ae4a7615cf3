"""Saves the running statistics of batch and instance norms, and restores them when a step is skipped.

An overflow in the forward pass reaches the running statistics before the step is skipped, and makes every later evaluation
wrong (pytorch/pytorch#88474, #90342).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from halfpeak.core.torch_compat import host_values


class BatchNormStats:
    """The running statistics of some models, with a copy that the end of a skipped step restores.

    The copy is from before the step's first forward pass with gradients (:meth:`begin_forward`), and contains what was written
    after the last step (by a loaded checkpoint, ``update_bn``). A step affects the models whose parameters its optimizers
    hold: a skipped step of the discriminator keeps the generator's new statistics, unless these are not finite.

    A step takes a few launches per (model, device, dtype), whatever the number of layers, and no wait for the device.

    Args:
        modules: the models whose batch norms, and instance norms that track statistics, are saved.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._models: list[ModelStats] = []
        for module in modules:
            self.add_model(module)

    def add_model(self, module: nn.Module) -> None:
        """Add the norms of one more model."""
        known = {id(norm) for model in self._models for norm in model.norms}
        norms = [norm for norm in norms_of(module) if id(norm) not in known]
        if norms:
            self._models.append(ModelStats(module, norms))

    def begin_forward(self) -> None:
        """Before the first forward pass with gradients since a step, save the statistics."""
        if torch.is_grad_enabled():
            for model in self._models:
                model.begin_forward()

    def after_load(self) -> None:
        """Save the statistics after a checkpoint was loaded, so that a skipped step does not restore older ones."""
        for model in self._models:
            model.after_load()

    def models_of(self, parameters: Iterable[Tensor]) -> frozenset[int]:
        """The indices of the models that have one of the parameters."""
        wanted = {id(parameter) for parameter in parameters}
        return frozenset(number for number, model in enumerate(self._models) if model.has_any(wanted))

    def end_step(self, found_inf: Tensor | bool, models: frozenset[int] | None = None) -> None:
        """Keep the new statistics if the step was clean, else restore the saved ones.

        Args:
            found_inf: a scalar on the device, for which the host does not wait, or a bool if the host already knows.
            models: the models whose parameters were stepped (:meth:`models_of`); None means all.
        """
        if isinstance(found_inf, Tensor) and (known := host_values(found_inf)) is not None:
            found_inf = bool(known[0])
        for number, model in enumerate(self._models):
            if models is None or number in models:
                model.end_step(found_inf)
            else:
                model.end_step_of_others(found_inf)

    def saved(self) -> list[Tensor]:
        """What a skipped step would restore: one flat tensor per (model, device, dtype), in the order of the layers."""
        return [flat for model in self._models for flat in model.saved()]

    def restore_saved(self, saved: Sequence[Tensor], *, is_loaded: bool = False) -> None:
        """Restore what :meth:`saved` returned; the present statistics replace tensors that are missing or do not fit.

        Unless ``is_loaded``, :meth:`after_load` keeps them until the next step, because the model may be loaded after this.
        """
        rest = list(saved)
        for model in self._models:
            count = model.restore_saved(rest, is_loaded=is_loaded)
            del rest[:count]


class ModelStats:
    """The statistics of one model.

    Attributes:
        norms: the layers that hold them.
        has_begun: whether a forward pass has begun since the last step.
    """

    def __init__(self, module: nn.Module, norms: list[nn.Module]) -> None:
        self.norms = norms
        self.has_begun = False
        self._module = module
        self._saved = self._now()
        self._from_checkpoint = False

    def has_any(self, parameters: set[int]) -> bool:
        """Whether the model has one of the parameters, by ``id``."""
        return any(id(parameter) in parameters for parameter in self._module.parameters())

    def begin_forward(self) -> None:
        """Save the statistics, if this is the first forward pass since the last step."""
        if not self.has_begun:
            self._saved = self._now()
            self.has_begun = True

    def after_load(self) -> None:
        """Save what was loaded, unless the saved statistics themselves are from a checkpoint."""
        if not self._from_checkpoint:
            self._saved = self._now()

    def end_step(self, found_inf: Tensor | bool) -> None:
        """Keep the new statistics, or restore the saved ones."""
        if found_inf is not False:
            for live, saved in self._pairs():
                _put_back(live, saved, found_inf)
        # The next window's first forward pass saves, too, but a compiled one does not tell that it begins.
        self._saved = {} if self.has_begun else self._now()
        self.has_begun = self._from_checkpoint = False

    def end_step_of_others(self, found_inf: Tensor | bool) -> None:
        """After a skipped step of other models, restore the saved statistics if the new ones are not finite."""
        if found_inf is not False:
            for live, saved in self._pairs():
                lost = ~torch.isfinite(_flat(live)).all()
                skipped = lost if found_inf is True else lost & (found_inf.to(lost.device) != 0)
                _put_back(live, saved, skipped)

    def saved(self) -> list[Tensor]:
        """What a skipped step would restore: one flat tensor per (device, dtype)."""
        return list((self._saved if self.has_begun else self._now()).values())

    def restore_saved(self, saved: Sequence[Tensor], *, is_loaded: bool) -> int:
        """Restore the first tensors of ``saved``, as many as this model has; returns their number."""
        live = self._now()
        loaded = {
            key: flat.to(key[0], key[1], copy=True)
            for key, flat in zip(live, saved, strict=False)
            if flat.shape == live[key].shape
        }
        self._from_checkpoint = bool(loaded) and not is_loaded
        # If the live statistics of a loaded model equal the saved ones, no forward pass had begun.
        differs = any(not torch.equal(live[key], flat) for key, flat in loaded.items())
        self.has_begun = differs if is_loaded else bool(loaded)
        self._saved = {**live, **loaded}
        return len(live)

    def _now(self) -> dict[_Key, Tensor]:
        return {key: _flat(live) for key, live in self._by_key().items()}

    def _pairs(self) -> list[tuple[list[Tensor], Tensor]]:
        """Pairs of live and saved statistics, where their sizes still match."""
        pairs = [(live, self._saved.get(key)) for key, live in self._by_key().items()]
        return [
            (live, saved)
            for live, saved in pairs
            if saved is not None and saved.numel() == sum(buffer.numel() for buffer in live)
        ]

    def _by_key(self) -> dict[_Key, list[Tensor]]:
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
    # .data leaves version counters as they are, like the batch-norm kernels: a forward pass may still wait for its backward
    # pass, such as the generator's when the discriminator's step is skipped.
    torch._foreach_copy_(
        [buffer.data for buffer in live],
        [part.view_as(buffer) for part, buffer in zip(parts, live, strict=True)],
    )


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
