"""Rewriting of training loops for ``apex.amp``: a loop is matched as a whole and rewritten with an engine or torch."""
