"""``apex.parallel.LARC``, the module; of ``apex.parallel`` the same name is the class."""

from halfpeak.amp.larc import LARC

__all__ = ["LARC"]
