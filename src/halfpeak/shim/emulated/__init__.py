"""The former name of :mod:`halfpeak.shim.apex_impl`, kept because pickled models refer to classes under it."""

import sys

from halfpeak.shim.apex_impl import collectives, ddp, layer_norm, op_lists, stash, syncbn

for _module in (collectives, ddp, layer_norm, op_lists, stash, syncbn):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
