"""Rewriting of code for apex.amp, ``torch.cuda.amp`` and mmcv into code for halfpeak or ``torch.amp``. Needs libcst."""

from halfpeak.migrate.findings import TARGETS, Finding, Target
from halfpeak.migrate.project import Migrated, migrate
from halfpeak.migrate.rewrite import Rewritten, rewrite

__all__ = ["TARGETS", "Finding", "Migrated", "Rewritten", "Target", "migrate", "rewrite"]
