"""The exceptions that halfpeak raises.

Each is also the builtin class that the older libraries raised in the same place, so ``except`` clauses written for
them still work::

    HalfpeakError
    ├── ConfigError (ValueError, RuntimeError, AssertionError)  an argument is refused; nothing was changed
    │   └── ConfigTypeError (TypeError)                an argument has the wrong type
    ├── LossIdError (IndexError)                       a loss_id that num_losses does not reach
    ├── OrderError (RuntimeError)                      a call at the wrong moment
    │   └── ClosureError                               a closure that cannot be run under loss scaling
    ├── ParameterError (TypeError)                     a parameter that halfpeak cannot train
    ├── RegistryError (KeyError, TypeError)            a name that is unknown to a registry, or already taken in it
    ├── StateError (ValueError, RuntimeError)          a state dict that does not fit; nothing was loaded
    ├── CheckpointError (RuntimeError)                 a file that is damaged, or not plain data
    │   └── MissingCheckpointError (FileNotFoundError)  there is no such file
    ├── BannedOpError (NotImplementedError)            an operation that is unsafe in a low dtype
    ├── LossScaleCollapse (RuntimeError, ArithmeticError)  gradients stay non-finite at the smallest scale
    ├── RankMismatchError (RuntimeError)               ranks that step together disagree
    └── RankLostError (RuntimeError)                   another rank has died or hangs
"""

from __future__ import annotations


class HalfpeakError(Exception):
    """Base of every exception that halfpeak raises on purpose."""


class ConfigError(HalfpeakError, ValueError, RuntimeError, AssertionError):
    """An argument is refused. The message names the value, the allowed ones and what to write."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument has the wrong type."""


class LossIdError(HalfpeakError, IndexError):
    """A ``loss_id`` that ``num_losses`` does not reach."""


class OrderError(HalfpeakError, RuntimeError):
    """A call came at a moment when it would act on scaled, stale or missing gradients."""


class ClosureError(OrderError):
    """A closure cannot be run correctly here. The message says why."""


class ParameterError(HalfpeakError, TypeError):
    """A parameter is of a kind, or in a place, that cannot be trained as asked."""


class RegistryError(HalfpeakError, KeyError, TypeError):
    """A name is unknown to a registry, or already taken in it. The message gives similar names."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the message quoted and on one line


class StateError(HalfpeakError, ValueError, RuntimeError):
    """A state dict does not fit the object it was given to. Nothing was loaded."""


class CheckpointError(HalfpeakError, RuntimeError):
    """A checkpoint file is damaged, or holds something other than plain data.

    Args:
        advice: what to write instead; the message ends with it.

    Attributes:
        reason: the message without the advice.
        damaged: whether the file is cut off, or a checksum in it is wrong.
    """

    def __init__(self, reason: str, advice: str = "", *, damaged: bool = False) -> None:
        super().__init__(f"{reason}; {advice}" if advice else reason)
        self.reason = reason
        self.damaged = damaged


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint file."""


class BannedOpError(HalfpeakError, NotImplementedError):
    """An operation that is unsafe in float16 and bfloat16 was called on such a tensor. apex raised NotImplementedError."""


class LossScaleCollapse(HalfpeakError, RuntimeError, ArithmeticError):
    """Gradients stayed non-finite although the loss scale cannot fall any further.

    Attributes:
        parameters: names of the parameters whose last gradients were not finite.
    """

    def __init__(self, message: str, parameters: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.parameters = parameters

    def __reduce__(self) -> tuple[type[LossScaleCollapse], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.parameters)


class RankMismatchError(HalfpeakError, RuntimeError):
    """Ranks that take a step together hold different configuration or state."""


class RankLostError(HalfpeakError, RuntimeError):
    """Another rank has died or hangs, so that a collective could not end."""
