"""``mmcv.runner.default_constructor`` as of 1.7.2."""

from halfpeak.runner import RUNNER_BUILDERS, RUNNERS, DefaultRunnerConstructor

__all__ = ["RUNNERS", "RUNNER_BUILDERS", "DefaultRunnerConstructor"]
