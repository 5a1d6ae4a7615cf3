"""``checkpoint.pt`` of halfpeak train: an engine's state, or a wrapper's, and how to go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfpeak.checkpoint.canonical import Contents
from halfpeak.checkpoint.formats.format import Format, add_entries


def read(tree: Any) -> Contents | None:
    """The contents of a run of halfpeak train."""
    if not isinstance(tree, Mapping) or not (
        tree.get("format") == "halfpeak.train" or {"plan", "driver", "fingerprint"} <= set(tree)
    ):
        return None
    contents = Contents(form="train")
    driver = tree.get("driver")
    if "driver" in tree and not contents.add_engine(driver) and isinstance(driver, Mapping):
        contents.add_model("driver.model", driver.get("model"))
        contents.add_optimizer("driver.wrapper", driver.get("wrapper"))
    others = ((key, value) for key, value in tree.items() if key != "driver")
    add_entries(contents, others, contents.add_counter)
    return contents


FORMAT = Format("train", "a run of halfpeak train", read)
