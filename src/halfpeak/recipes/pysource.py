"""``pysource``: a byte-level GPT on the source text of Python's own standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from halfpeak.core.errors import ConfigError
from halfpeak.recipes.base import Batch
from halfpeak.recipes.gpt import SHAPES, ByteGPT
from halfpeak.recipes.settings import RECIPES, TrainConfig

HELD_OUT_OF = 20
"""One file in this many is held out."""

VALIDATION_SAMPLES = 64

DEFAULTS = RECIPES["pysource"].defaults


class PySource:
    """The library's ``.py`` files end to end, each followed by a zero byte, cut into windows of ``context`` bytes.

    Training and held-out text share no file: the digest of a file's path decides to which text it belongs.
    """

    unit = "tokens"

    def __init__(
        self, size: str, context: int, batch: int, device: torch.device, root: Path | None = None
    ) -> None:
        self._shape = SHAPES[size]
        self.units = context
        training, held_out = _read(root or Path(sysconfig.get_paths()["stdlib"]))
        self.fingerprint = hashlib.sha256(training + held_out).hexdigest()
        self._training = torch.frombuffer(bytearray(training), dtype=torch.uint8).to(device)
        self._held_out = torch.frombuffer(bytearray(held_out), dtype=torch.uint8).to(device)
        self._batch = batch
        self.samples = (len(training) - 1) // context
        self._held_out_samples = min(VALIDATION_SAMPLES, (len(held_out) - 1) // context)
        if self.samples < 1 or self._held_out_samples < 1:
            raise ConfigError(
                f"context={context} is longer than the text of recipe 'pysource'; write context={DEFAULTS['context']}"
            )

    def model(self) -> nn.Module:
        """A new transformer."""
        return ByteGPT(self._shape, self.units)

    def batch(self, indices: Tensor) -> Batch:
        """The training windows with these indices."""
        return self._windows(self._training, indices)

    def validation(self) -> Iterator[Batch]:
        """Windows spread evenly over the held-out text."""
        last = (len(self._held_out) - 1) // self.units - 1
        for chosen in torch.linspace(0, last, self._held_out_samples).long().split(self._batch):
            yield self._windows(self._held_out, chosen)

    def _windows(self, text: Tensor, indices: Tensor) -> Batch:
        starts = (indices * self.units).to(text.device, non_blocking=True)
        places = starts[:, None] + torch.arange(self.units + 1, device=text.device)
        windows = text[places].long()
        return Batch(windows[:, :-1], windows[:, 1:])


def _read(root: Path) -> tuple[bytes, bytes]:
    """Read the training and the held-out text from the files under ``root``."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "dist-packages" in name or not path.is_file():
            continue
        held_out = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % HELD_OUT_OF == 0
        parts[held_out].append(path.read_bytes() + b"\0")
    if not all(parts):
        raise ConfigError(
            f"recipe 'pysource' finds too little Python source text under {root}; use recipe 'digits'"
        )
    return b"".join(parts[0]), b"".join(parts[1])


def build(config: TrainConfig, device: torch.device) -> PySource:
    """Build the recipe with the configured size and context, on the library of the running Python."""
    size, context = config.size or DEFAULTS["size"], config.context or DEFAULTS["context"]
    return PySource(size, context, config.batch, device)
