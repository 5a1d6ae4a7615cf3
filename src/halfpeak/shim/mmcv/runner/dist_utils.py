"""``mmcv.runner.dist_utils`` as of 1.7.2."""

from halfpeak.runner import allreduce_grads, allreduce_params, get_dist_info, init_dist, master_only

__all__ = ["allreduce_grads", "allreduce_params", "get_dist_info", "init_dist", "master_only"]
