"""The ready training jobs of ``halfpeak train``: a model, its data, and what is measured."""
