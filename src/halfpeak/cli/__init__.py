"""What a person types: ``halfpeak <command>``."""
