"""Old imports of apex, mmcv and mmengine work again between :func:`install` and :func:`uninstall`.

>>> import halfpeak.shim
>>> halfpeak.shim.install()  # the same as install("apex")
>>> from apex import amp
>>> halfpeak.shim.uninstall()

Importing this package changes nothing: before ``install``, a script that looks for apex finds none.
"""

from halfpeak.shim.installing import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
