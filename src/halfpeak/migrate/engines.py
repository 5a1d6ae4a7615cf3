"""Engines: under which name the engine, or the scaler, of a training loop is reached in each of its functions."""

from __future__ import annotations

from typing import Final

import libcst as cst

from halfpeak.migrate.calls import argument, ending_as, keyword_of
from halfpeak.migrate.edits import Edits
from halfpeak.migrate.training import Initialize, Unsure
from halfpeak.migrate.tree import Tree, names_in, walk

_PASS: Final = "pass the engine there, and rewrite it by hand; or keep halfpeak.amp"


class Engines:
    """The object that a loop gets from its ``initialize``: a local name, a global one, or an attribute of ``self``.

    A function that is given the optimizer as an argument is given the object too, if every call of it can be seen.
    """

    def __init__(self, tree: Tree, initialize: Initialize, word: str) -> None:
        self._tree = tree
        self._initialize = initialize
        self._home = tree.function(initialize.line)
        self._in_self = all(name.startswith("self.") for name in initialize.names)
        taken = {one.value for one in walk(tree.module) if isinstance(one, cst.Name)}
        self._name = word if word not in taken else f"amp_{word}"
        self._functions: dict[cst.FunctionDef, list[cst.Call]] = {}

    @property
    def home(self) -> str:
        """What it is called where it is made."""
        return f"self.{self._name}" if self._in_self else self._name

    def at(self, node: cst.CSTNode, optimizer: cst.BaseExpression | None = None) -> str:
        """What it is called at a node, where the optimizer is called so.

        Raises:
            Unsure: it cannot be reached there for certain.
        """
        function = self._tree.function(node)
        if function is self._home:
            return self.home
        if self._in_self:
            owner = self._tree.class_of(self._home)
            if owner is None or self._tree.class_of(function) is not owner:
                raise self._unsure(node, "it is in another class than amp.initialize")
            return self.home
        if function in self._functions:
            return self._name
        if self._home is None or (function is not None and self._home in self._tree.parents(function)):
            if optimizer is not None and not self._is_same_variable(optimizer):
                raise self._unsure(node, f"{self._tree.code(optimizer)} may be another object there")
            return self._name
        if function is None or optimizer is None:
            raise self._unsure(node, "it is in another function than amp.initialize")
        self._functions[function] = self._calls(function, optimizer)
        return self._name

    def pass_on(self, edits: Edits) -> None:
        """Give the functions that need it a parameter, and the calls of them an argument."""
        for function, calls in self._functions.items():
            edits.node(function.params, self._with_parameter)
            for call in calls:
                edits.expression(call, self._with_argument)

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
        """Every call of a function, each made beside ``amp.initialize`` and given the optimizer under its name."""
        name, code = function.name.value, self._tree.code(optimizer)
        positions = [one.name.value for one in (*function.params.posonly_params, *function.params.params)]
        scope = self._tree.scope(function)
        assignments = list(scope[name]) if scope is not None else []
        if code not in positions or len(assignments) != 1 or self._tree.class_of(function) is not None:
            raise self._unsure(
                function.name, f"it is not seen from where {name} is called that it gets {code}"
            )
        calls: list[cst.Call] = []
        for access in assignments[0].references:
            call = self._tree.call_of(access.node)
            if (
                call is None
                or self._tree.function(call) is not self._home
                or any(arg.star for arg in call.args)
            ):
                raise self._unsure(access.node, f"{name} is used away from amp.initialize")
            given = {keyword_of(arg) or positions[place]: arg.value for place, arg in enumerate(call.args)}
            if code not in given or self._tree.code(given[code]) != code:
                raise self._unsure(call, f"{name} is called with another {code}")
            calls.append(call)
        if not calls:
            raise self._unsure(function.name, f"{name} is not called in this file")
        return calls

    def _unsure(self, node: cst.CSTNode, reason: str) -> Unsure:
        return Unsure(node, "amp", reason, _PASS)
