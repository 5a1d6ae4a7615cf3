"""Rewriting of the names of apex, ``torch.cuda.amp`` and mmcv in code as those of halfpeak or torch. Needs libcst."""

from halfpeak.migrate.findings import TARGETS, Finding, Target
from halfpeak.migrate.project import Migrated, migrate
from halfpeak.migrate.rewrite import Rewritten, rewrite

__all__ = ["TARGETS", "Finding", "Migrated", "Rewritten", "Target", "migrate", "rewrite"]
