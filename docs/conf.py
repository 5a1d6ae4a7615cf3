"""How the pages are built."""

import importlib
import inspect
import re
from importlib import metadata

from sphinx.application import Sphinx

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
    "autodata": ["   :no-value:"],
    "autoclass": ["   :members:"],
    "autoexception": [],
}
OF_EARLIER_RELEASES = "   :exclude-members: plan, index, taken, skipped, has_open_window"


def setup(app: Sphinx) -> None:
    """Have the pages of docs/api filled in."""
    app.connect("source-read", fill_in)


def fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the public names of a module, as a table and with what each is, in the place of ``<!-- public module -->``."""
    source[0] = re.sub(
        r"<!-- public (\S+)(.*) -->", lambda match: public(match[1], match[2].split()), source[0]
    )


def public(name: str, names: list[str]) -> str:
    """The part of a page about a module: about ``names``, or else its ``__all__``."""
    module = importlib.import_module(name)
    names = names or [one for one in module.__all__ if not one.startswith("_") and one != "amp"]
    lines = [f".. automodule:: {name}", "   :no-members:", "", f".. currentmodule:: {name}", ""]
    lines += [".. autosummary::", "   :nosignatures:", "", *(f"   {one}" for one in names)]
    for one in names:
        thing = getattr(module, one)
        kind = "autofunction" if callable(thing) else "autodata"
        if inspect.isclass(thing):
            kind = "autoexception" if issubclass(thing, Exception) else "autoclass"
        lines += ["", f".. {kind}:: {one}", *KINDS[kind], *([OF_EARLIER_RELEASES] if one == "Engine" else [])]
        if kind == "autoclass":
            # What the classes of torch and of others have is not described again.
            others = [base.__name__ for base in thing.__mro__ if not base.__module__.startswith("halfpeak.")]
            lines.append(f"   :inherited-members: {', '.join(others)}")
    return "\n".join(["```{eval-rst}", *lines, "```"])
