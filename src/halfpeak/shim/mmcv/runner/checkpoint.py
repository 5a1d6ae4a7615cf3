"""``mmcv.runner.checkpoint`` as of 1.7.2."""

from halfpeak.runner import load_checkpoint, load_state_dict, save_checkpoint, weights_to_cpu
from halfpeak.runner.weights import get_state_dict

__all__ = ["get_state_dict", "load_checkpoint", "load_state_dict", "save_checkpoint", "weights_to_cpu"]
