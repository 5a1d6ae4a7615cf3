"""``mmcv.runner.builder`` as of 1.7.2."""

from halfpeak.runner import RUNNER_BUILDERS, RUNNERS, build_runner, build_runner_constructor

__all__ = ["RUNNERS", "RUNNER_BUILDERS", "build_runner", "build_runner_constructor"]
