"""One run by halfpeak, with the methods of :class:`fuzz.reference.Reference`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import halfpeak
from fuzz import models
from fuzz.config import Config
from fuzz.reference import Result, Structure, critic, first_structure, losses_of, structure_of


class Subject:
    """A training run with an engine."""

    def __init__(self, config: Config, like: Structure | None = None) -> None:
        self.config = config
        self.keep: dict[str, Any] = {}
        self.model = models.build(config.parts, config.heads, config.seed)
        structure = like or first_structure(config, self.model)
        structure.freeze(self.model)
        self.engine = halfpeak.prepare(
            self.model,
            structure.optimizers(config, self.model),
            config.chosen_level,
            scale=config.scale_config,
            num_losses=config.losses,
            accumulate=config.accumulate,
            clip=config.clipping,
            **config.keywords,
        )

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.engine.optimizers

    def forward(self, at: int) -> list[Tensor]:
        with self.engine.forward():
            return losses_of(self.config, self.model, at)

    def critic_step(self, at: int) -> None:
        """Step a network with its own engine on a loss that reaches this run's model."""
        if "critic" not in self.keep:
            net = critic()
            self.keep["critic"] = halfpeak.prepare(
                net, torch.optim.SGD(net.parameters(), lr=0.1), halfpeak.LEVELS["O0"].replace(loss_scale=64.0)
            )
        engine, losses = self.keep["critic"], self.forward(at)
        with engine.forward():
            loss = engine.model(sum(losses).view(1, 1)).sum()
        engine.backward(loss)
        engine.step()

    def casts(self) -> Any:
        return self.engine.forward()

    def backward(
        self, loss: Tensor, loss_id: int = 0, optimizers: Sequence[int] | None = None, *, retain: bool = False
    ) -> None:
        self.engine.backward(loss, loss_id=loss_id, optimizers=self._chosen(optimizers), retain_graph=retain)

    def step(self, optimizers: Sequence[int] | None = None) -> Result:
        result = self.engine.step(optimizers=self._chosen(optimizers))
        norm = None if result.grad_norm is None else float(result.grad_norm)
        return Result(result.boundary, bool(result.found_inf), float(result.scale), norm)

    def unscale(self) -> None:
        self.engine.unscale()

    def abort(self) -> None:
        self.engine.abort()

    def main_of(self, parameter: nn.Parameter) -> Tensor:
        return self.engine.pairs.main_of(parameter)

    def model_of(self, main: Tensor) -> Tensor:
        return self.engine.pairs.weight_of(main)

    def holder_of(self, parameter: nn.Parameter) -> Tensor:
        return parameter

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.engine.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        self.engine.load_state_dict(state)

    def load_optimizers(self, states: Sequence[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def structure(self) -> Structure | None:
        return structure_of(self)

    def restarted(self) -> Subject:
        state = self.state()
        structure = self.structure()  # after the state, for which both sides agree on requires_grad
        if structure is None:
            return self
        fresh = Subject(self.config, structure)
        fresh.load(state)
        return fresh

    @property
    def num_steps(self) -> int:
        return int(self.engine.num_steps)

    @property
    def num_skipped(self) -> int:
        return int(self.engine.num_skipped)

    @property
    def micro(self) -> int:
        return self.engine.micro_step

    def load_values(self, values: dict[str, Tensor], *, assign: bool = False) -> None:
        self.model.load_state_dict(values, assign=assign)

    def settle(self) -> None:
        """Let both sides of a gradient agree after an edit, unless gradients may be left scaled."""
        if not self.config.is_fused:
            self.engine.unscale()

    def zero_model(self, *, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=set_to_none)

    def step_with_closure(self, at: int) -> None:
        def closure() -> Tensor:
            self.optimizers[0].zero_grad()
            losses = self.forward(at)
            for loss_id, loss in enumerate(losses):
                self.backward(loss, loss_id, retain=True)
            return losses[0]

        self.engine.step(closure)

    def look(self) -> None:
        engine = self.engine
        str(engine.memory())
        engine.main_params()
        str([engine.is_open, engine.read_scale(), engine.config, engine])

    def other_engine(self, level: str) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        engine = halfpeak.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
        with engine.forward():
            loss = model(torch.ones(3, 4)).float().square().sum()
        engine.backward(loss)
        engine.step()

    def _chosen(self, optimizers: Sequence[int] | None) -> list[torch.optim.Optimizer] | None:
        return None if optimizers is None else [self.optimizers[o] for o in optimizers]
