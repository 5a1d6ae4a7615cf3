"""ParamGroups: one group per parameter of a model, in the order of its modules; the base class of both constructors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from halfpeak.optim.paramwise import Place, check_paramwise, custom_key, is_dcn


class ParamGroups(ABC):
    """Reads a ``paramwise_cfg`` and walks through a model. Subclasses make the group of each parameter."""

    optimizer_cfg: Mapping[str, Any]

    def _read(self, paramwise_cfg: Mapping[str, Any] | None) -> None:
        self.paramwise_cfg: Mapping[str, Any] = {} if paramwise_cfg is None else paramwise_cfg
        self.base_lr: Any = self.optimizer_cfg.get("lr")
        self.base_wd: Any = self.optimizer_cfg.get("weight_decay")
        check_paramwise(self.paramwise_cfg, self.base_lr, self.base_wd, strict=not self._is_customised())

    def add_params(
        self,
        params: list[dict[str, Any]],
        module: nn.Module,
        prefix: str = "",
        is_dcn_module: bool | None = None,
    ) -> None:
        """Append the groups of a module and its submodules to ``params``.

        Args:
            params: extended in place.
            prefix: the path of ``module`` in the model.
            is_dcn_module: whether ``module`` is part of a deformable convolution.
        """
        for name, parameter in module.named_parameters(recurse=False):
            self._add(params, parameter, Place(name, module, prefix, bool(is_dcn_module)))
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            self.add_params(params, child, prefix=path, is_dcn_module=is_dcn(module))

    @abstractmethod
    def _add(self, params: list[dict[str, Any]], parameter: nn.Parameter, place: Place) -> None:
        """Append the group of a parameter, unless the parameter gets none."""

    @abstractmethod
    def _multipliers(self, parameter: nn.Parameter, place: Place) -> tuple[float | None, float | None]:
        """Return the multipliers of lr and weight decay without an entry of ``custom_keys``; None without a rule."""

    def _options(self, parameter: nn.Parameter, place: Place) -> tuple[str | None, dict[str, Any]]:
        """Return the key of ``custom_keys`` that decides, or None, and the lr and weight decay that rules set."""
        custom: Mapping[str, Mapping[str, Any]] = self.paramwise_cfg.get("custom_keys", {})
        key = custom_key(custom, place)
        if key is not None:
            lr, decay = custom[key].get("lr_mult", 1.0), custom[key].get("decay_mult", 1.0)
        else:
            lr, decay = self._multipliers(parameter, place)
        options: dict[str, Any] = {}
        if lr is not None and self.base_lr is not None:
            options["lr"] = self.base_lr * lr
        if decay is not None and self.base_wd is not None:
            options["weight_decay"] = self.base_wd * decay
        return key, options

    def _is_customised(self) -> bool:
        """Whether user code overrides how groups are made, and may thus read further keys."""
        methods: Sequence[Any] = (type(self).add_params, type(self).__call__)
        return not all(method.__module__.startswith("halfpeak.") for method in methods)


def is_in(parameter: Tensor, params: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a group holds a parameter."""
    return any(parameter is other for group in params for other in members_of(group))


def members_of(group: Mapping[str, Any]) -> Iterable[Tensor]:
    """The parameters of a group."""
    members = group["params"]
    return [members] if isinstance(members, Tensor) else members
