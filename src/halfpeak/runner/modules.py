"""BaseModule, and the containers with ``init_weights``. Compatible with mmcv 1.7.2."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from halfpeak.core.errors import ConfigError
from halfpeak.core.short_repr import short_repr

InitCfg = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


class BaseModule(nn.Module):
    """A module whose weights :meth:`init_weights` initialises after construction.

    Args:
        init_cfg: the initialisation, in the format of mmcv and read by mmengine; None leaves the weights unchanged.

    >>> class Head(BaseModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(2, 1)
    >>> Head().init_weights()
    """

    def __init__(self, init_cfg: InitCfg = None) -> None:
        super().__init__()
        self._is_init = False
        self.init_cfg = copy.deepcopy(init_cfg)

    @property
    def is_init(self) -> bool:
        """Whether :meth:`init_weights` has been called."""
        return self._is_init

    def init_weights(self) -> None:
        """Initialise this module and then its children, once. Children of a ``"Pretrained"`` module are skipped.

        Raises:
            ConfigError: there is an ``init_cfg``, and mmengine is not installed.
        """
        if self._is_init:
            return
        if self.init_cfg:
            _initialize(self, self.init_cfg)
        self._is_init = True
        if isinstance(self.init_cfg, Mapping) and self.init_cfg.get("type") == "Pretrained":
            return
        for child in self.children():
            initialise: Any = getattr(child, "init_weights", None)
            if callable(initialise):
                initialise()


class Sequential(BaseModule, nn.Sequential):
    """``torch.nn.Sequential`` with ``init_weights``."""

    def __init__(self, *args: Any, init_cfg: InitCfg = None) -> None:
        BaseModule.__init__(self, init_cfg)
        nn.Sequential.__init__(self, *args)


class ModuleList(BaseModule, nn.ModuleList):
    """``torch.nn.ModuleList`` with ``init_weights``."""

    def __init__(self, modules: Any = None, init_cfg: InitCfg = None) -> None:
        BaseModule.__init__(self, init_cfg)
        nn.ModuleList.__init__(self, modules)


class ModuleDict(BaseModule, nn.ModuleDict):
    """``torch.nn.ModuleDict`` with ``init_weights``."""

    def __init__(self, modules: Any = None, init_cfg: InitCfg = None) -> None:
        BaseModule.__init__(self, init_cfg)
        nn.ModuleDict.__init__(self, modules)


def _initialize(module: nn.Module, init_cfg: Any) -> None:
    try:
        from mmengine.model import initialize
    except ImportError:
        raise ConfigError(
            f"init_cfg={short_repr(init_cfg)} is read by mmengine, which is not installed; write pip install mmengine-lite, or "
            "override init_weights"
        ) from None
    initialize(module, init_cfg)
