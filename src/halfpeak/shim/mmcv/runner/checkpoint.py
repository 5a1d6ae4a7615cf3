"""``mmcv.runner.checkpoint`` as of 1.7.2."""

from halfpeak.runner import load_checkpoint, load_state_dict, save_checkpoint, weights_to_cpu

__all__ = ["load_checkpoint", "load_state_dict", "save_checkpoint", "weights_to_cpu"]
