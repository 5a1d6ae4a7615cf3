"""The training jobs of ``halfpeak train``: models, their data, their settings, and the loop that trains them."""
