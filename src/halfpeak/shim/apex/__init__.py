"""The ``apex`` package, as of 25.04. Its modules are imported when they are first asked for."""
