"""How the pages are built."""

import importlib
import inspect
import re
import sys
from importlib import metadata

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

project = "halfpeak"
author = "The halfpeak developers"
copyright = author
release = version = metadata.version("halfpeak")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
pygments_style = "tango"
html_title = f"halfpeak {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
copybutton_exclude = ".linenos, .gd"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autosummary_generate = False  # the names stand in the pages of docs/api
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
KINDS = {
    "autofunction": [],
    "py:data": [],
    "autoclass": ["   :members:"],
    "autoexception": [],
}
LEFT_OUT = {
    # What other APIs and tools call.
    "Engine": "tell replay call_after_step before_step after_step",
    # What an engine calls of a fused optimizer.
    "FusedOptimizer": "copied rule measure decide matches_layout detach_tables set_step_inputs check_state "
    "profile_hook_step has_master",
}
"""Members of a class, and of those made from it, that are no part of its interface for a training script."""


def setup(app: Sphinx) -> None:
    """Have the pages of docs/api filled in."""
    app.connect("source-read", fill_in)
    app.connect("autodoc-process-docstring", link_pages)


def fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the public names of a module, as a table and with what each is, in the place of ``<!-- public module -->``."""
    source[0] = re.sub(
        r"<!-- public (\S+)(.*) -->", lambda match: public(match[1], match[2].split()), source[0]
    )


def link_pages(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Make links of the pages that a docstring names by their files. A value has the text below its assignment."""
    if what == "data" and not any(lines):
        lines[:] = [words_below(name.rpartition(".")[2])]
    lines[:] = [re.sub(r"``docs/(\S+)\.md``", r":doc:`/\1`", line) for line in lines]


def public(name: str, names: list[str]) -> str:
    """The part of a page about a module: about ``names``, or else its ``__all__``."""
    module = importlib.import_module(name)
    names = names or [one for one in module.__all__ if not one.startswith("_") and one != "amp"]
    names.sort(key=lambda one: one != "prepare")  # what a reader looks for first
    lines = [f".. automodule:: {name}", "   :no-members:", "", f".. currentmodule:: {name}", ""]
    lines += [".. autosummary::", "   :nosignatures:", "", *(f"   {one}" for one in names)]
    for one in names:
        thing = getattr(module, one)
        kind = "autofunction" if callable(thing) else "py:data"
        if inspect.isclass(thing):
            kind = "autoexception" if issubclass(thing, Exception) else "autoclass"
        lines += ["", f".. {kind}:: {one}", *KINDS[kind]]
        if kind == "py:data":
            lines += ["", f"   {words_below(one)}"]
        if kind == "autoclass":
            mro = thing.__mro__[1:]
            # What the classes of torch and of others have is not described again, nor what public ones on this page have.
            described = [
                base for base in mro if base.__name__ in names or not base.__module__.startswith("halfpeak.")
            ]
            lines.append(f"   :inherited-members: {', '.join(base.__name__ for base in described)}")
            if any(base.__name__ in names for base in mro):
                lines.append("   :show-inheritance:")
            left_out = [name for base in thing.__mro__ for name in LEFT_OUT.get(base.__name__, "").split()]
            if left_out:
                lines.append(f"   :exclude-members: {', '.join(left_out)}")
    return "\n".join(["```{eval-rst}", *lines, "```"])


def words_below(name: str) -> str:
    """The text below an assignment, wherever in halfpeak it stands; autodoc would take that of the value's class instead."""
    for module in sorted(one for one in sys.modules if one.split(".")[0] == "halfpeak"):
        words = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
        if words:
            return " ".join(words).strip()
    return ""
