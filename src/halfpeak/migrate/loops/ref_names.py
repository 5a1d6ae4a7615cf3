"""RefNames: the name by which each function of a training loop refers to the engine, or to the scaler."""

from __future__ import annotations

from typing import Final

import libcst as cst

from halfpeak.migrate.calls import argument, ending_as, keyword_of
from halfpeak.migrate.edits import Edits
from halfpeak.migrate.findings import NotSupported
from halfpeak.migrate.loops.loop_match import Initialize
from halfpeak.migrate.tree import Tree, names_in, walk

_PASS: Final = "pass the engine there, and rewrite it by hand; or keep halfpeak.amp"


class RefNames:
    """The new object that takes the place of ``amp``: a local name, a global one, or an attribute of ``self``.

    A function that gets the optimizer as an argument gets the object too, if every call of the function is visible.

    Args:
        initialize: where the object is made.
        word: its name, unless the file uses that word already.
    """

    def __init__(self, tree: Tree, initialize: Initialize, word: str) -> None:
        self._tree = tree
        self._initialize = initialize
        self._function = tree.function(initialize.statement)
        self._in_self = all(name.startswith("self.") for name in initialize.numbers)
        used = {one.value for one in walk(tree.module) if isinstance(one, cst.Name)}
        self._name = word if word not in used else f"amp_{word}"
        self._receivers: dict[cst.FunctionDef, list[cst.Call]] = {}

    @property
    def own(self) -> str:
        """The name where the object is made."""
        return f"self.{self._name}" if self._in_self else self._name

    def at(self, node: cst.CSTNode, optimizer: cst.BaseExpression | None = None) -> str:
        """The name at a node, where ``optimizer`` is the expression for the optimizer.

        Raises:
            NotSupported: it is not certain that the object can be reached there.
        """
        function = self._tree.function(node)
        if function is self._function:
            return self.own
        if self._in_self:
            owner = self._tree.class_of(self._function)
            if owner is None or self._tree.class_of(function) is not owner:
                raise self._unsupported(node, "it is in another class than amp.initialize")
            return self.own
        if function in self._receivers:
            return self._name
        if self._function is None or (
            function is not None and self._function in self._tree.parents(function)
        ):
            if optimizer is not None and not self._is_same_variable(optimizer):
                raise self._unsupported(node, f"{self._tree.code(optimizer)} may be another object there")
            return self._name
        if function is None or optimizer is None:
            raise self._unsupported(node, "it is in another function than amp.initialize")
        self._receivers[function] = self._calls(function, optimizer)
        return self._name

    def pass_on(self, edits: Edits) -> None:
        """Add a parameter to the functions that need the object, and an argument to their calls."""
        for function, calls in self._receivers.items():
            edits.replace(function.params, self._with_parameter)
            for call in calls:
                edits.replace(call, self._with_argument)

    def _with_parameter(self, params: cst.Parameters) -> cst.Parameters:
        star = (
            cst.ParamStar()
            if params.star_arg is cst.MaybeSentinel.DEFAULT and not params.kwonly_params
            else None
        )
        parameter = cst.Param(cst.Name(self._name))
        more = params.with_changes(kwonly_params=[*params.kwonly_params, parameter])
        return more if star is None else more.with_changes(star_arg=star)

    def _with_argument(self, call: cst.Call) -> cst.Call:
        more, last = argument(self._name, self._name), call.args[-1]
        return call.with_changes(args=[*call.args[:-1], ending_as(last, more), ending_as(more, last)])

    def _is_same_variable(self, optimizer: cst.BaseExpression) -> bool:
        there = next(names_in(optimizer), None)
        here = next(names_in(self._initialize.optimizers), None)
        if there is None or here is None:
            return False
        scopes = self._tree.scope(there), self._tree.scope(here)
        return all(scopes) and scopes[0][there.value] == scopes[1][there.value]  # pyright: ignore[reportOptionalSubscript]

    def _calls(self, function: cst.FunctionDef, optimizer: cst.BaseExpression) -> list[cst.Call]:
        """Every call of a function, all made beside ``amp.initialize`` with the optimizer under its name."""
        name, code = function.name.value, self._tree.code(optimizer)
        positions = [one.name.value for one in (*function.params.posonly_params, *function.params.params)]
        scope = self._tree.scope(function)
        assignments = list(scope[name]) if scope is not None else []
        if code not in positions or len(assignments) != 1 or self._tree.class_of(function) is not None:
            raise self._unsupported(
                function.name, f"it is not seen from where {name} is called that it gets {code}"
            )
        calls: list[cst.Call] = []
        for access in assignments[0].references:
            call = self._tree.call_of(access.node)
            if (
                call is None
                or self._tree.function(call) is not self._function
                or any(arg.star for arg in call.args)
            ):
                raise self._unsupported(access.node, f"{name} is used away from amp.initialize")
            given = {keyword_of(arg) or positions[place]: arg.value for place, arg in enumerate(call.args)}
            if code not in given or self._tree.code(given[code]) != code:
                raise self._unsupported(call, f"{name} is called with another {code}")
            calls.append(call)
        if not calls:
            raise self._unsupported(function.name, f"{name} is not called in this file")
        return calls

    def _unsupported(self, node: cst.CSTNode, reason: str) -> NotSupported:
        return NotSupported(node, "amp", reason, _PASS)
