"""Graphs: the ways of an engine to make one graph of a whole training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from torch import Tensor

from halfpeak.engine.capture import Captured, capture
from halfpeak.engine.readings import Readings
from halfpeak.engine.whole import Compiled, Whole

if TYPE_CHECKING:
    from halfpeak.engine.engine import Engine

P = ParamSpec("P")
R = TypeVar("R")


class Graphs(Readings):
    """What an :class:`~halfpeak.Engine` runs without Python, or nearly so.

    Attributes:
        whole: of the compiled step that is running or being traced, or None.
    """

    whole: Whole | None = None

    def compile(self, function: Callable[P, R], **options: Any) -> Compiled[P, R]:
        """Compile a function that trains, from the forward pass to :meth:`~halfpeak.Engine.step`, as one graph.

        What ``torch.compile`` alone breaks at ``engine.backward`` and ``engine.step`` is whole here: loss, scaled backward
        pass, and one operator for all that the engine does, which Python runs as ever. So optimizers, hyper-parameters,
        schedules, scale, clips and skips may do what they like without a new trace. What the function returns is detached.

        Gradients go to what the optimizers step, and are gone after the step. Weights must not be written otherwise inside
        the function, and buffers of norms are put back after a skip as ever.

        Args:
            function: calls :meth:`~halfpeak.Engine.forward`, ``backward`` and ``step``, as often as it likes.
            options: of ``torch.compile``, with ``fullgraph=True`` unless you say otherwise.

        Raises:
            ConfigError: this torch cannot trace a backward pass, there are several ranks, or the engine needs to run in the
                middle of one. The message says what to write.

        Example:
            >>> import torch, halfpeak
            >>> model = torch.nn.Linear(4, 2)
            >>> engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "O4")
            >>> def train_step(model, engine, x):
            ...     with engine.forward():
            ...         loss = model(x).float().square().mean()
            ...     engine.backward(loss)
            ...     return loss, engine.step()
            >>> train = engine.compile(train_step, backend="aot_eager")
            >>> loss, result = train(model, engine, torch.ones(3, 4))
            >>> result.stepped()
            True
        """
        return Compiled(cast("Engine", self), function, options)

    def capture(self, loss_function: Callable[..., Tensor], *inputs: Tensor) -> Captured:
        """Forward, backward and step as one CUDA graph: a whole training step for the price of one launch.

        The engine must be on a CUDA device, with one optimizer of :mod:`halfpeak.fused`, one loss, no accumulation, and a
        clip by the 2-norm or none. Three iterations are run first, in which nothing moves: model, optimizer, loss scale,
        batch-norm statistics and random generators are as before when this returns. What the model and the loss function
        do must be the same in every step; see ``torch.cuda.graph``.

        Args:
            loss_function: from inputs to the loss.
            inputs: examples, of the shapes and dtypes that all others will have.

        Returns:
            A function of inputs that trains one step and returns the loss and its :class:`~halfpeak.StepResult`.

        Raises:
            ConfigError: something that a graph cannot hold. The message says what to write.
            OrderError: a window is open.
        """
        return capture(cast("Engine", self), loss_function, inputs)
