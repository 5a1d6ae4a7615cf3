"""The command line: ``halfpeak <command>``."""
