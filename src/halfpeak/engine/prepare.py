"""prepare: makes an Engine from models, optimizers and an opt level. Checks everything before it changes anything."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from halfpeak.casting.inputs import warn_of_rounding
from halfpeak.casting.modules import holds_constants
from halfpeak.core.accumulation import Accumulation
from halfpeak.core.dtypes import LOW
from halfpeak.core.errors import ConfigError, ConfigTypeError
from halfpeak.core.keywords import known_keywords
from halfpeak.core.levels import Level, LevelName
from halfpeak.core.policy import Float8, Float8Recipe, KeepFp32, parse_modules
from halfpeak.core.schedule import ScaleConfig
from halfpeak.core.short_repr import short_repr
from halfpeak.core.suitable import level_for
from halfpeak.diagnosis.skips import OnSkip, watch_for
from halfpeak.engine.config import EngineConfig
from halfpeak.engine.engine import Engine
from halfpeak.fused.base import FusedOptimizer
from halfpeak.ops.shards import has_process_group
from halfpeak.parts.build import build
from halfpeak.parts.clip import Clip, parse_clip
from halfpeak.parts.found_inf import FoundInfReducer, Group
from halfpeak.parts.validation import (
    underflowing_eps,
)

OpLists = Literal["apex", "torch"]
"""Which op lists choose the dtype of each operation: apex's or torch.autocast's."""


_ELSEWHERE: Final = {
    **{
        name: f"level=halfpeak.LEVELS['O2'].replace({name}=...)"
        for name in inspect.signature(Level.replace).parameters
        if name != "self"
    },
    "mixed_precision": "level='O2' for float16, 'O5' for bfloat16, or 'O1' and 'O4' to cast per operation",
    "gradient_accumulation_steps": "accumulate=...",
    "max_grad_norm": "clip=...",
}
"""Keywords of ``amp.initialize``, accelerate and transformers, and what to write here."""


@known_keywords(_ELSEWHERE)
def prepare(
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer],
    level: LevelName | Level = "auto",
    *,
    keep_fp32: Sequence[KeepFp32] = (),
    cast_forward_inputs: bool = True,
    scale: ScaleConfig | None = None,
    num_losses: int = 1,
    accumulate: int | Accumulation = 1,
    clip: Clip | float | None = None,
    restore_buffers: bool = True,
    op_lists: OpLists = "torch",
    float8: Float8 | Float8Recipe | None = None,
    group: Group = None,
    check_ranks: int | None = None,
    on_skip: Literal["warn", "diagnose"] | OnSkip | None = "warn",
) -> Engine:
    """Convert models and optimizers in place for an opt level and return the engine that takes their steps.

    Call it after the models are on their device, before ``DistributedDataParallel`` wraps them, and after
    :func:`halfpeak.distributed.fully_shard`, whose float32 shards the optimizer steps. ``torch.compile`` may come
    before or after. Everything is checked first: if the call raises, models and optimizers are unchanged.

    Args:
        models: one module or several.
        optimizers: torch optimizers over their parameters. At levels with master weights, float32 masters replace the
            low-precision parameters in their groups.
        level: ``"O0"`` to ``"O5"``, or one of :data:`halfpeak.LEVELS` with other values, such as
            ``halfpeak.LEVELS["O2"].replace(loss_scale=128.0)``. ``"auto"`` suits the device of the parameters: O5 if it
            computes bfloat16 itself, else O0 on a CPU and O2 on an accelerator. The choice is logged once at ``logging.INFO``.
        keep_fp32: modules to store and compute in float32, with their submodules: classes, patterns of qualified names
            such as ``"head.*"``, or functions of name and module. :func:`halfpeak.diagnose` suggests some. Modules without
            parameters that have floating-point buffers, such as rotary embeddings, are always kept.
        cast_forward_inputs: round the floating-point inputs of a low model to its dtype. False leaves them as they are, as
            FSDP2's option of this name does: then pass low ones, except those with which the model computes in float32,
            such as time steps. A module of ``keep_fp32`` gets an input of the model as it was given in any case. Over shards
            give ``fully_shard`` False, too.
        scale: bounds, factors and interval of the loss scale; None means ``ScaleConfig(recovers=True)``.
        num_losses: number of independent loss scalers; ``engine.backward(loss, loss_id=...)`` chooses one.
        accumulate: backward passes per step, or an :class:`~halfpeak.Accumulation`.
        clip: a number clips by global norm; or ``ClipNorm(...)``, ``ClipValue(...)``.
        restore_buffers: restore batch-norm statistics when a step is skipped.
        op_lists: the lists by which O1 and O4 cast operations: ``"torch"``, those of ``torch.autocast`` for the model's
            device, or ``"apex"``, the same on every device, which cost more per operation.
        float8: O5 only: multiply in float8 in linear layers with sizes divisible by 16. A recipe of torchao,
            ``"tensorwise"``, ``"rowwise"`` or ``"rowwise_with_gw_hp"``; or a :class:`~halfpeak.Float8`, to exclude
            layers. Weights, masters and checkpoints are as at O5. A GPU must support float8; a CPU emulates it.
        group: ranks that must skip together although their gradients are not reduced over all of them; None if
            ``DistributedDataParallel`` reduces every gradient. Set ``parameter.allreduce = False`` on parameters that
            other ranks do not have (experts, pipeline stages): clipping then uses one norm of all ranks.
        check_ranks: call :meth:`halfpeak.Engine.check_ranks` every so many steps, even if that step raises.
        on_skip: the reaction to a skip that is not part of the usual search for a loss scale, to a scale near its
            floor, and to more than 5 % of skips in 200 steps. ``"warn"`` logs a line to ``"halfpeak"``, each kind at
            most once in 1,000 steps, without waiting. ``"diagnose"`` waits for each step, replays the bad one and
            writes ``diagnosis-<step>.html``. A function gets the engine and a
            :class:`~halfpeak.diagnosis.skips.SkipEvent`.

    Warns:
        UserWarning: the ``eps`` of an optimizer or a norm is zero in the dtype it is used in; the message has a remedy.

    Raises:
        ConfigError: an unknown level.
        ConfigTypeError: an unknown keyword; the message says what to write.
        ParameterError: a model or optimizer that cannot be prepared.
        MissingExtraError: ``float8`` without torchao.

    Example:
        >>> import torch, halfpeak
        >>> model = torch.nn.Linear(4, 2)
        >>> engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with engine.forward():
        ...     loss = model(torch.ones(3, 4)).square().mean()
        >>> engine.backward(loss)
        >>> engine.step().stepped()
        True
    """
    listed, optimizers = _listed(models, nn.Module), _listed(optimizers, Optimizer)
    chosen = level_for(level, listed)
    is_low = chosen.policy().param in LOW
    config = EngineConfig(
        properties=chosen.properties,
        policy=replace(
            chosen.policy(),
            keep_fp32=(*parse_modules("keep_fp32", keep_fp32), *((holds_constants,) if is_low else ())),
            cast_forward_inputs=cast_forward_inputs,
            float8=float8 if float8 is None or isinstance(float8, Float8) else Float8(float8),
        ),
        scale=chosen.properties.scale_config(ScaleConfig(recovers=True) if scale is None else scale),
        num_losses=num_losses,
        accumulation=accumulate if isinstance(accumulate, Accumulation) else Accumulation(every=accumulate),
        clip=parse_clip(clip),
        restore_buffers=restore_buffers,
        check_ranks=check_ranks,
    )
    if check_ranks is not None and not has_process_group():
        raise ConfigError(
            f"check_ranks={short_repr(check_ranks)} needs torch.distributed; call "
            "torch.distributed.init_process_group first, or leave it out"
        )
    if not cast_forward_inputs and config.policy.param is None:
        raise ConfigError(
            f"cast_forward_inputs=False is for levels that cast inputs, and {chosen.name} does not; leave it out"
        )
    watch, reducer = watch_for(on_skip), FoundInfReducer(group)
    if op_lists not in get_args(OpLists):
        raise ConfigError(
            f"op_lists={short_repr(op_lists)} must be one of {', '.join(map(repr, get_args(OpLists)))}"
        )
    # Fused steps read low gradients where they are, but not those of several passes.
    keeps_memory = config.accumulation.every > 1 or not all(isinstance(o, FusedOptimizer) for o in optimizers)
    parts = build(
        config.policy,
        listed,
        optimizers,
        casts="torch" if op_lists == "torch" else None,
        restores_buffers=restore_buffers,
        keeps_memory=keeps_memory,
        steps_low=False,
    )
    engine = Engine(config, parts, reducer=reducer)
    if is_low and cast_forward_inputs:
        parts.handles += map(warn_of_rounding, engine.models)
    for message in underflowing_eps(engine.models, engine.optimizers, config.policy):
        warnings.warn(message, stacklevel=3)
    if watch is not None:
        watch.attach(engine)
    return engine


def _listed(given: Any, kind: type[Any]) -> list[Any]:
    is_several = isinstance(given, Iterable) and not isinstance(given, (kind, Tensor))
    listed = list(given) if is_several else [given]
    wrong = [one for one in listed if not isinstance(one, kind)]
    if wrong:
        raise ConfigTypeError(
            f"{type(wrong[0]).__name__} is neither a torch {kind.__name__} nor a list of them; write prepare(model, optimizer, "
            "'O2'), the model first"
        )
    return listed
