"""The rule that moves a loss scale, once: for Python numbers, for tensors, and as a part of a Triton kernel.

Nothing here adds or multiplies float32 numbers, so nothing here rounds: what rounds (``grown``, ``fallen``) is an argument. The
three differ in ``where`` alone: a function of Python numbers, ``torch.where``, or ``tl.where``.
"""

# pyright: basic
from __future__ import annotations


def advance(
    scale, clean, grace, stuck, found,
    grown, fallen, floor, ceiling, interval, hysteresis, below, after_growth, after_overflow, after_failure,
    DYNAMIC, REFILLS_CLEAN, RECOVERS, where,
):  # fmt: skip
    """The state of a loss scale after an update; :func:`halfpeak.core.schedule.advance` says what it is.

    A new argument has a place in each of these::

        core/schedule.py       a field of ScaleConfig; numbers_of or switches_of, for advance_values; there, too, the shorter
                               way of a clean update that moves no scale, which does not call this function
        ops/triton/launch.py   control()
        ops/triton/control.py  the arguments of control_kernel, whole numbers also in do_not_specialize; the call
        ops/triton/decide.py   the call, with the number of entries of numbers_of (8 * k) and switches_of (3 * k)

    One more factor of the scale is a product beside ``grown`` and ``fallen``: in ``advance_values``, in both kernels, and among
    the ``factors`` of ``launch.decide()`` (2 * k).

    docs/ARCHITECTURE.md names the tests. A configuration shows a difference only if the history of its test reaches it: 25
    updates, two in five of them overflows, for control_kernel; at most four for decide_kernel. In ``tests/fuzz``, reference.py
    computes the rule by itself, and config.py and programs.py draw the fields.

    Args:
        scale, clean, grace, stuck: the state before.
        found: 0, or 1 after an overflow, or 0.5 if the loss itself was not finite.
        grown, fallen: the scale times its factors, rounded to float32.
        floor, ceiling, interval, hysteresis: see :class:`~halfpeak.core.schedule.ScaleConfig`.
        below, after_growth, after_overflow, after_failure: see :class:`~halfpeak.core.schedule.Recovery`.
        DYNAMIC, REFILLS_CLEAN, RECOVERS: known when the rule is compiled.
        where: ``where(condition, if_true, if_false)``.
    """
    overflow = found != 0
    count = where(overflow, 0, clean + 1)
    if not DYNAMIC:
        return scale, count, grace, where(overflow, stuck + 1, 0)
    falls = overflow & (grace - 1 <= 0)
    grows = (found == 0) & (count >= interval)
    # A scale outside its bounds (loaded, or set by user code) is clamped when it next moves, as in apex.
    lowered = where(fallen > floor, fallen, floor)
    raised = where(grown < ceiling, grown, ceiling)
    raised = where(grown < float("inf"), raised, scale)
    moved = where(falls, lowered, where(grows, raised, scale))
    count = where(grows, 0, count)
    eased = stuck * 0
    if RECOVERS:
        credit = where(overflow, where(clean >= after_growth, after_failure, after_overflow), after_growth)
        count = where((moved < below) & (overflow | grows), credit, count)
        eased = where((count % 2 == 0) & (stuck > 0), stuck - 1, stuck)
    worn = where(falls & (lowered >= scale), stuck + 1, where(overflow, stuck, eased))
    left = where(overflow, grace - 1, where((found == 0) if REFILLS_CLEAN else grows, hysteresis, grace))
    if RECOVERS:
        is_loss = found == 0.5
        moved = where(is_loss, scale, moved)
        count = where(is_loss, clean, count)
        left = where(is_loss, grace, left)
        worn = where(is_loss, stuck + 1, worn)
    return moved, count, left, worn


def found_of_loss(skip, explained, noted, OWN, where):
    """What the rule of a loss is told after a step: what its own passes have found.

    All losses of the engine (``OWN``) are to blame for a skip that no pass explains.

    Args:
        skip: whether the step is skipped.
        explained: the largest of all ``noted``.
        noted: what the passes of this loss have found.
    """
    return where(skip, where((explained > 0) | (not OWN), noted, noted * 0 + 1.0), noted * 0)


def moves(found, scale, first, COUNTS):
    """Whether a loss scale moves. It does not if a step of other optimizers has answered the overflow already.

    Args:
        found: of :func:`found_of_loss`.
        scale: now.
        first: in the first of the passes.
        COUNTS: whether a clean window counts: once, in the first step after its passes.
    """
    if COUNTS:
        return (found == 0) | (scale >= first)
    return (found > 0) & (scale >= first)
