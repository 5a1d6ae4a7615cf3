"""What old scripts import from apex and halfpeak itself has no use for; rows of the table in ``shim/apex.py`` lead here."""
