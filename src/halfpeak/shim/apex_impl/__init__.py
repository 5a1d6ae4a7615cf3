"""Objects that only old scripts for apex need; the table in ``shim/apex.py`` refers to them."""
