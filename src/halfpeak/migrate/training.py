"""Training: a training loop written for ``apex.amp``, as values: what is initialised, run backward, stepped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import libcst as cst

from halfpeak.core.errors import HalfpeakError
from halfpeak.migrate.findings import Finding, Refusal
from halfpeak.migrate.tree import Tree, Use

Block = cst.Module | cst.IndentedBlock
Function = cst.FunctionDef | None


class Unsure(HalfpeakError):
    """Code that may mean something else than what can be written for it."""

    def __init__(self, node: cst.CSTNode, code: str, reason: str, write: str) -> None:
        super().__init__(f"{code}: {reason}; {write}")
        self.node = node
        self.code = code
        self.refusal = Refusal(reason, write)

    def finding(self, tree: Tree) -> Finding:
        """The same for a report."""
        return Finding(tree.line(self.node), self.code, self.refusal.reason, self.refusal.write)


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Initialize:
    """``model, optimizer = amp.initialize(model, optimizer, opt_level=...)``.

    Attributes:
        line: the statement.
        models: the first argument.
        optimizers: the second.
        keywords: the others.
        names: how each optimizer is called, by its number.
        count: how many optimizers there are.
        level: the opt level, if it is written there.
        result: what the result is called, where that differs from the arguments.
    """

    line: cst.SimpleStatementLine
    use: Use
    models: cst.BaseExpression
    optimizers: cst.BaseExpression
    keywords: dict[str, cst.Arg]
    names: dict[str, int]
    count: int
    level: str | None
    result: str | None


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Backward:
    """``with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()``."""

    statement: cst.With
    block: Block
    index: int
    loss: cst.BaseExpression
    loss_id: cst.BaseExpression | None
    optimizer: cst.BaseExpression
    number: int
    args: Sequence[cst.Arg]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Step:
    """``optimizer.step()``."""

    line: cst.SimpleStatementLine
    block: Block
    index: int
    optimizer: cst.BaseExpression
    number: int


@dataclass(eq=False, kw_only=True, slots=True)
class Training:
    """One loop, or several that share an ``initialize``.

    Attributes:
        uses: every use of amp, by the name in amp.
    """

    initialize: Initialize
    passes: list[Backward] = field(default_factory=list[Backward])
    steps: list[Step] = field(default_factory=list[Step])
    uses: dict[str, list[Use]] = field(default_factory=dict[str, "list[Use]"])

    def blocks(self) -> Iterator[Block]:
        """The blocks that backward passes stand in."""
        yield from {id(one.block): one.block for one in self.passes}.values()
