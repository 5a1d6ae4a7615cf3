"""RefNames: the name by which each function of a rewritten loop refers to the engine or scaler."""

from __future__ import annotations

from typing import Final

import libcst as cst

from halfpeak.migrate.calls import argument, ending_as, named_args
from halfpeak.migrate.edits import Edits
from halfpeak.migrate.findings import NotSupported
from halfpeak.migrate.loops.loop_match import Initialize
from halfpeak.migrate.tree import Tree, names_in, walk

_PASS: Final = "pass the engine there, and rewrite it by hand; or keep halfpeak.amp"


class RefNames:
    """The name of the engine or scaler that replaces ``amp``: a local or global name, or an attribute of ``self``.

    A function with the optimizer as a parameter gets the object as another, if every call of the function is visible.

    Args:
        initialize: the call in whose place the object is made.
        word: the name of the object; ``amp_<word>`` if the file uses this name already.
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
        """The expression for the object where it is made."""
        return f"self.{self._name}" if self._in_self else self._name

    def at(self, node: cst.CSTNode, optimizer: cst.BaseExpression | None = None) -> str:
        """The expression for the object at a node, where ``optimizer`` is the expression for the optimizer.

        Raises:
            NotSupported: it is not certain that code at the node can reach the object.
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
        """Add a parameter to each function that needs the object, and an argument to its calls."""
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
        """Every call of a function: all must be beside ``amp.initialize`` and pass the optimizer under its name."""
        name, code = function.name.value, self._tree.code(optimizer)
        positions = [one.name.value for one in (*function.params.posonly_params, *function.params.params)]
        scope = self._tree.scope(function)
        assignments = list(scope[name]) if scope is not None else []
        if code not in positions or len(assignments) != 1 or self._tree.class_of(function) is not None:
            raise self._unsupported(
                function.name, f"it is not certain that every call of {name} passes {code}"
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
            given = named_args(call, positions).get(code)
            if given is None or self._tree.code(given.value) != code:
                raise self._unsupported(call, f"{name} is called with another {code}")
            calls.append(call)
        if not calls:
            raise self._unsupported(function.name, f"{name} is not called in this file")
        return calls

    def _unsupported(self, node: cst.CSTNode, reason: str) -> NotSupported:
        return NotSupported(node, "amp", reason, _PASS)
