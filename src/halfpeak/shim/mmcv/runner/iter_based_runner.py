"""``mmcv.runner.iter_based_runner`` as of 1.7.2."""

from halfpeak.runner import RUNNERS, BaseRunner, IterBasedRunner, IterLoader, save_checkpoint

__all__ = ["RUNNERS", "BaseRunner", "IterBasedRunner", "IterLoader", "save_checkpoint"]
