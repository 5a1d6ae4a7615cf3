"""Old imports of apex, mmcv and mmengine work again between :func:`install` and :func:`uninstall`.

>>> import halfpeak.shim
>>> halfpeak.shim.install()  # the same as install("apex")
>>> from apex import amp
>>> halfpeak.shim.uninstall()

Importing this package changes nothing: before ``install``, a script that looks for apex finds none.

``shim/apex.py``, ``mmcv.py`` and ``mmengine.py`` each define a :class:`~halfpeak.shim.spec.Shim`: a table of modules
with the sources of their names, absent names with advice, and a setup function. ``shim/finder.py`` makes the modules.
To add a name or a module, write it into the table. The object itself lives in halfpeak's package for it, or in
``shim/apex_impl`` if only old scripts need it, and is the same in every install. A row takes names from halfpeak, from
torch, or from rows below it, but never from ``apex...`` by that name: where a real package is installed, the table
fills its gaps, and the neighbouring module may be the real one.
"""

from halfpeak.shim.installing import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
