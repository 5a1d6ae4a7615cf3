"""What only old scripts ask for, and halfpeak itself has no use for; the trees of import names lead here."""
