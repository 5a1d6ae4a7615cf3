"""Old imports work again where a script asks for it: :func:`install` and :func:`uninstall`.

>>> import halfpeak.shim
>>> halfpeak.shim.install()  # the same as install("apex")
>>> from apex import amp
>>> halfpeak.shim.uninstall()

Nothing here happens by itself: until ``install``, a script that asks whether there is an apex finds none.

What can be installed is a :class:`~halfpeak.shim.spec.Shim` each, in ``shim/apex.py``, ``mmcv.py`` and ``mmengine.py``: a table
of modules, where the names of each come from, which names are absent with what to use instead, and what else to do at
install. ``shim/finder.py`` makes modules from it. To add a name or a module, write it into the table. The object itself lives
in halfpeak's package for it, or in ``shim/apex_impl`` if only old scripts want it, and is the same over every install.
A row takes names from halfpeak, from torch, or from rows below it, but never from ``apex...`` by that name: where a real
package is installed, the table fills its gaps, and the neighbouring module may be the real one.
"""

from halfpeak.shim.installing import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
