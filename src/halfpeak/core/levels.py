"""The opt levels O0 to O5, the properties they set, and the rules for overriding a property.

A level is a row of defaults. Overrides are checked one by one in a fixed order, exactly as in apex. The result gives the
:class:`~halfpeak.core.policy.Policy` and the :class:`~halfpeak.core.schedule.ScaleConfig` of a run.

O0 to O3 are the levels of NVIDIA's apex, O4 and O5 those of its ROCm fork; the float32 masters of O2 and O5 are those of
Mixed Precision Training, Micikevicius et al. 2018 (arXiv:1710.03740), section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

import torch

from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.keywords import known_keywords
from halfpeak.core.policy import NormRule, Policy
from halfpeak.core.schedule import ScaleConfig, require_scale
from halfpeak.core.short_repr import short_repr

LossScale = float | Literal["dynamic"]

LevelName = Literal["auto", "O0", "O1", "O2", "O3", "O4", "O5"]
"""The name of a level, or ``"auto"`` for the level that suits the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Properties:
    """What a run does, under apex's names and in apex's print order.

    Attributes:
        enabled: whether anything is done at all.
        opt_level: name of the level, or None before one was chosen.
        cast_model_type: dtype of parameters, buffers and forward inputs; None or False leaves them alone.
        patch_torch_functions: cast per operation.
        patch_torch_functions_type: the low dtype of per-operation casts.
        keep_batchnorm_fp32: leave normalisation layers in float32.
        master_weights: the optimizer steps float32 copies.
        loss_scale: a number or ``"dynamic"``.
    """

    enabled: bool = False
    opt_level: str | None = None
    cast_model_type: torch.dtype | Literal[False] | None = None
    patch_torch_functions: bool = False
    patch_torch_functions_type: torch.dtype | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: LossScale = 1.0

    def policy(self, *, norms: NormRule = "all", output: torch.dtype | None = None) -> Policy:
        """The policy of these properties.

        Args:
            norms: which layers ``keep_batchnorm_fp32=True`` keeps in float32.
            output: dtype that ``forward`` returns; None means float32 where the model is cast, else as computed.
        """
        cast = self.cast_model_type or None
        return Policy(
            param=cast,
            compute=self.patch_torch_functions_type if self.patch_torch_functions else cast,
            output=output if output is not None else (torch.float32 if cast is not None else None),
            masters=bool(self.master_weights),
            norms=norms if self.keep_batchnorm_fp32 else "none",
            per_op=self.patch_torch_functions,
        )

    def scale_config(self, base: ScaleConfig | None = None) -> ScaleConfig:
        """The loss-scale configuration: ``base`` with the scale of these properties."""
        base = ScaleConfig() if base is None else base
        if not isinstance(base, ScaleConfig):
            is_scale = isinstance(base, int | float | str) and not isinstance(base, bool)
            level = f"level=halfpeak.LEVELS[{self.opt_level!r}].replace(loss_scale={short_repr(base)})"
            write = level if is_scale else "scale=halfpeak.ScaleConfig(init=1024.0)"
            raise ConfigTypeError(f"scale={short_repr(base)} must be a ScaleConfig; write {write}")
        if self.loss_scale == "dynamic":
            return replace(base, dynamic=True)
        return replace(base, dynamic=False, init=self.loss_scale)

    def bounded_scale(
        self, floor: float | None, ceiling: float | None, *, patience: int | None = 100
    ) -> ScaleConfig:
        """:meth:`scale_config` between apex's ``min_loss_scale`` and ``max_loss_scale``, which a static scale ignores.

        Raises:
            ConfigTypeError: the scale is dynamic and ``ceiling`` is None.
            ConfigError: the scale is dynamic and a bound is not a finite number above zero.
        """
        is_dynamic = self.loss_scale == "dynamic"
        return self.scale_config(
            ScaleConfig.bounded(floor, ceiling, patience=patience)
            if is_dynamic
            else ScaleConfig(patience=patience)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One opt level: what it is for and what it sets; :meth:`replace` makes a level that differs in some of it.

    Attributes:
        name: ``"O0"`` to ``"O5"``.
        brief: one line.
        properties: what it sets, under apex's names.
        norms: the layers that ``keep_batchnorm_fp32`` means: ``"all"`` normalisation layers, or ``"batchnorm"``, apex's
            rule.
        cast_model_outputs: dtype of what ``forward`` returns; None means float32 where the model is cast.

    >>> import halfpeak
    >>> halfpeak.LEVELS["O2"].replace(loss_scale=128.0).properties.loss_scale
    128.0
    """

    name: LevelName
    brief: str
    properties: Properties
    norms: NormRule = "all"
    cast_model_outputs: torch.dtype | None = None

    @known_keywords()
    def replace(
        self,
        *,
        cast_model_type: torch.dtype | Literal[False] | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: torch.dtype | None = None,
        norms: NormRule | None = None,
    ) -> Level:
        """This level with the given values; None keeps what it has.

        Args:
            cast_model_type: dtype of parameters, buffers and inputs; False leaves them alone.
            patch_torch_functions: cast per operation (O1, O4 only).
            keep_batchnorm_fp32: leave normalisation layers in float32.
            master_weights: step float32 copies of low parameters.
            loss_scale: a number, or ``"dynamic"``.
            cast_model_outputs: dtype of what ``forward`` returns.
            norms: ``"all"`` or ``"batchnorm"``.

        Raises:
            ConfigError: a value that the level does not allow.
            ConfigTypeError: an unknown keyword.
        """
        if cast_model_outputs is not None and not isinstance(cast_model_outputs, torch.dtype):
            raise ConfigTypeError(
                f"cast_model_outputs={short_repr(cast_model_outputs)} must be a torch.dtype, such as torch.float16"
            )
        changed = _override(
            self.properties,
            cast_model_type=cast_model_type,
            patch_torch_functions=patch_torch_functions,
            keep_batchnorm_fp32=keep_batchnorm_fp32,
            master_weights=master_weights,
            loss_scale=loss_scale,
        )
        level = replace(
            self,
            properties=changed,
            norms=self.norms if norms is None else norms,
            cast_model_outputs=cast_model_outputs or self.cast_model_outputs,
        )
        level.policy()  # checks the norms
        return level

    def policy(self) -> Policy:
        """The dtype in which each thing is stored, computed and returned."""
        return self.properties.policy(norms=self.norms, output=self.cast_model_outputs)


def _level(name: LevelName, brief: str, **properties: Any) -> Level:
    return Level(name=name, brief=brief, properties=Properties(enabled=True, opt_level=name, **properties))


LEVELS: Final[Mapping[str, Level]] = MappingProxyType(
    {
        level.name: level
        for level in (
            _level(
                "O0",
                "Pure FP32 training.\n",
                cast_model_type=torch.float32,
                master_weights=False,
                loss_scale=1.0,
            ),
            _level(
                "O1",
                "Insert automatic casts around torch functions; weights stay FP32.\n",
                patch_torch_functions=True,
                patch_torch_functions_type=torch.float16,
                loss_scale="dynamic",
            ),
            _level(
                "O2",
                "FP16 training with FP32 batch norms and FP32 master weights.\n",
                cast_model_type=torch.float16,
                keep_batchnorm_fp32=True,
                master_weights=True,
                loss_scale="dynamic",
            ),
            _level(
                "O3",
                "Pure FP16 training.",
                cast_model_type=torch.float16,
                keep_batchnorm_fp32=False,
                master_weights=False,
                loss_scale=1.0,
            ),
            _level(
                "O4",
                "Insert automatic BF16 casts around torch functions; weights stay FP32.\n",
                patch_torch_functions=True,
                patch_torch_functions_type=torch.bfloat16,
                loss_scale=1.0,
            ),
            _level(
                "O5",
                "BF16 training with FP32 batch norms and FP32 master weights.\n",
                cast_model_type=torch.bfloat16,
                keep_batchnorm_fp32=True,
                master_weights=True,
                loss_scale=1.0,
            ),
        )
    }
)
"""Every opt level by its name."""

PER_OP: Final = frozenset(name for name, level in LEVELS.items() if level.properties.patch_torch_functions)
"""The levels that cast per operation."""

Refuse = Callable[[str], None]


def _raise(message: str) -> None:
    raise ConfigError(message)


def resolve(
    opt_level: str,
    *,
    enabled: bool | None = None,
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    patch_torch_functions_type: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    refuse: Refuse = _raise,
) -> Properties:
    """The properties of ``opt_level`` with the given overrides; None means the level's own value.

    Args:
        refuse: called with the message when an override makes no sense at this level. The default raises
            :class:`~halfpeak.ConfigError`; a function that returns lets the value through.

    Raises:
        ConfigError: an unknown level, or an override that the level does not allow.

    >>> resolve("O2", loss_scale="128.0", keep_batchnorm_fp32="False").loss_scale
    128.0
    >>> resolve("O1", master_weights=True)
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.ConfigError: master_weights=True makes no sense with opt_level='O1', which ...
    """
    return _override(
        get_level(opt_level).properties,
        enabled=enabled,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        patch_torch_functions_type=patch_torch_functions_type,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        refuse=refuse,
    )


def _override(
    properties: Properties,
    *,
    enabled: bool | None = None,
    cast_model_type: Any = None,
    patch_torch_functions: Any = None,
    patch_torch_functions_type: Any = None,
    keep_batchnorm_fp32: Any = None,
    master_weights: Any = None,
    loss_scale: Any = None,
    refuse: Refuse = _raise,
) -> Properties:
    opt_level = properties.opt_level or ""
    per_op = opt_level in PER_OP
    changes: dict[str, Any] = {}
    if enabled is not None:
        changes["enabled"] = bool(enabled)
    if cast_model_type is not None:
        changes["cast_model_type"] = _check_cast(cast_model_type, opt_level, per_op, refuse)
    if patch_torch_functions is not None:
        if patch_torch_functions and not per_op:
            refuse(
                f"patch_torch_functions={short_repr(patch_torch_functions)} makes no sense with opt_level={opt_level!r}: only "
                "O1 and O4 cast per operation; write opt_level='O1' or 'O4'"
            )
        changes["patch_torch_functions"] = bool(patch_torch_functions)
    if patch_torch_functions_type is not None:
        own = properties.patch_torch_functions_type
        if patch_torch_functions_type is own:
            changes["patch_torch_functions_type"] = own
        else:
            refuse(
                f"patch_torch_functions_type={short_repr(patch_torch_functions_type)} makes no sense with opt_level="
                f"{opt_level!r}: O1 casts operations to torch.float16, O4 to torch.bfloat16, the other levels cast none; "
                "choose by opt_level, and leave this out"
            )
    if keep_batchnorm_fp32 is not None:
        if per_op:
            refuse(
                f"keep_batchnorm_fp32={short_repr(keep_batchnorm_fp32)} makes no sense with opt_level={opt_level!r}, which "
                "leaves every weight in float32; leave it out"
            )
        changes["keep_batchnorm_fp32"] = _parse_flag("keep_batchnorm_fp32", keep_batchnorm_fp32)
    if master_weights is not None:
        if per_op:
            refuse(
                f"master_weights={short_repr(master_weights)} makes no sense with opt_level={opt_level!r}, which leaves every "
                "weight in float32; leave it out"
            )
        changes["master_weights"] = bool(master_weights)
    if loss_scale is not None:
        changes["loss_scale"] = parse_loss_scale(loss_scale)
    return replace(properties, **changes)


_ELSEWHERE: Final = {
    **dict.fromkeys(("fp32", "float32", "32", "32-true", "no"), "O0"),
    **dict.fromkeys(("fp16-mixed", "16-mixed"), "O1"),
    **dict.fromkeys(("fp16", "float16", "half", "16-true"), "O2"),
    **dict.fromkeys(("bf16-mixed",), "O4"),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-true"), "O5"),
}
"""Names that Lightning, accelerate and torch give to a precision, and the level nearest to each."""


def get_level(opt_level: object) -> Level:
    """The level of that name; a level itself is returned as it is.

    Raises:
        ConfigError: there is none. The message names the level that was probably meant, also for other libraries' names.

    >>> get_level("bf16-mixed")
    Traceback (most recent call last):
    ...
    halfpeak.core.errors.ConfigError: Unexpected optimization level 'bf16-mixed'; write 'O4', which is nearest to it
    """
    if isinstance(opt_level, Level):
        return opt_level
    level = LEVELS.get(opt_level) if isinstance(opt_level, str) else None
    if level is None:
        given = short_repr(opt_level).strip("'").lower().removeprefix("torch.")
        near = _ELSEWHERE.get(given)
        if near is not None:
            raise ConfigError(
                f"Unexpected optimization level {short_repr(opt_level)}; write {near!r}, which is nearest to it"
            )
        is_known = f"O{given[-1:]}" in LEVELS and given[:-1] in ("", "o", "0")
        names = repr(f"O{given[-1]}") if is_known else f"one of {', '.join(map(repr, LEVELS))}"
        letter = "" if is_known and given[:-1] != "0" else ", with the letter O, not the digit zero"
        raise ConfigError(f"Unexpected optimization level {short_repr(opt_level)}; write {names}{letter}")
    return level


def parse_loss_scale(value: object) -> LossScale:
    """Parse a loss scale: ``"dynamic"``, or anything that ``float`` accepts and that is finite and above zero.

    >>> parse_loss_scale("128.0")
    128.0

    Raises:
        ConfigError: anything else.
    """
    if isinstance(value, str) and value == "dynamic":
        return "dynamic"
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ConfigError(
            f"loss_scale={short_repr(value)} must be 'dynamic' or a number, such as 128.0"
        ) from None
    return require_scale("loss_scale", number)


def _check_cast(value: Any, opt_level: str, per_op: bool, refuse: Refuse) -> torch.dtype | Literal[False]:
    if value is False:
        return False
    if per_op and value is not torch.float32:
        refuse(
            f"cast_model_type={short_repr(value)} makes no sense with opt_level={opt_level!r}, which leaves the model in "
            "float32 and casts per operation; write opt_level='O2' or 'O5' for a low model"
        )
    if not isinstance(value, torch.dtype) or (value is not torch.float32 and value not in LOW):
        raise ConfigError(
            f"cast_model_type={short_repr(value)} must be torch.float16, torch.bfloat16, torch.float32, or False for no cast"
        )
    return value


def _parse_flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value in ("True", "False"):
        return value == "True"
    raise ConfigError(f"{name}={short_repr(value)} must be True, False, 'True' or 'False'")
