"""Old imports work again, for who asks for it: :func:`install` and :func:`uninstall`.

>>> import halfpeak.shim
>>> halfpeak.shim.install()  # the same as install("apex")
>>> from apex import amp
>>> halfpeak.shim.uninstall()

Nothing here happens by itself: a script that asks whether there is an apex is told the truth until ``install``.

What can be installed stands in ``shim/table.py``, a row (:class:`~halfpeak.shim.description.Shim`) each: which import
names it brings and the folder or file behind each, which names it refuses with advice, and what else is to be done at
install and undone at uninstall. The files below ``shim/apex/`` are laid out as apex is and loaded as ``apex...``, never
as ``halfpeak.shim.apex...``; where a real package is installed, single files of the tree fill its gaps. So they

* import from ``halfpeak`` by absolute names, or relatively within their own folder; never from ``apex``: a neighbouring
  folder may be the real one;
* re-export, and define no class: those live in a room of halfpeak (``shim/emulated/`` for what nobody else needs), where
  they stay the same over every install;
* are found by being there: a new file is importable, as an attribute of its package too;
* leave out what is not provided; the row's ``absent`` says what to use for it and for everything below it.
"""

from halfpeak.shim.installing import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
