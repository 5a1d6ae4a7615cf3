"""A training loop of ``apex.amp``: recognised as a whole, and written anew with an engine or with torch alone."""
