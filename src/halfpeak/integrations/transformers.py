"""A ``Trainer`` with opt levels, for Hugging Face transformers 5.x."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers
from accelerate.utils import GradientAccumulationPlugin
from transformers.utils import CONFIG_NAME

from halfpeak.core.errors import ConfigError
from halfpeak.core.levels import Level, LevelName
from halfpeak.integrations.accelerate import Accelerator
from halfpeak.optim.unwrap import unwrap
from halfpeak.parts.state_dict_hooks import has_fp32_state_dict


class HalfpeakTrainer(transformers.Trainer):
    """A ``transformers.Trainer`` that trains at a level.

    Its accelerator is :class:`halfpeak.integrations.accelerate.Accelerator`, so unscaled gradients are clipped,
    schedulers do not step after a skipped step, and a checkpoint holds the float32 weights and the loss scale. What
    ``save_model`` and checkpoints write, ``from_pretrained`` loads in float32, with the masters' values.

    Args:
        args: of ``transformers.Trainer``. Its ``TrainingArguments`` must set neither ``fp16`` nor ``bf16``.
        level: of :func:`halfpeak.prepare`.
        options: of :func:`halfpeak.prepare`, by name, except those that the Trainer handles itself.
        kwargs: of ``transformers.Trainer``.

    Raises:
        ConfigError: the accelerator refuses the arguments, or the model was sharded when it was loaded.
    """

    def __init__(
        self,
        *args: Any,
        level: LevelName | Level = "auto",
        options: Mapping[str, Any] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        self._level: LevelName | Level = level
        self._level_options = options
        super().__init__(*args, **kwargs)
        if getattr(self.model, "is_distributed_loading_by_transformers", False):
            raise ConfigError(
                "from_pretrained(distributed_config=...) has sharded the model by transformers itself, which a level cannot "
                "follow; load it without, and write TrainingArguments(fsdp=True, fsdp_config={...}), which shards by the level"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Replace the Trainer's accelerator by an accelerator at this level with the same settings."""
        super().create_accelerator_and_postprocess()
        theirs = self.accelerator
        self.accelerator = Accelerator(
            level=self._level,
            options=self._level_options,
            mixed_precision=theirs.mixed_precision,
            dataloader_config=theirs.dataloader_config,
            gradient_accumulation_plugin=GradientAccumulationPlugin(**theirs.gradient_state.plugin_kwargs),
            fsdp_plugin=getattr(theirs.state, "fsdp_plugin", None),
            kwargs_handlers=[theirs.ddp_handler] if theirs.ddp_handler is not None else None,
        )
        keywords = getattr(self.gather_function, "keywords", {})
        self.gather_function = partial(self.accelerator.gather_for_metrics, **keywords)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save as the Trainer does, with the dtype of the saved weights in the configuration.

        transformers writes the dtype that the model stores, to which ``from_pretrained`` would round the saved weights.
        """
        super()._save(output_dir, state_dict)
        given: Any = self.model
        model: Any = unwrap(given)
        path = Path(output_dir or self.args.output_dir or "") / CONFIG_NAME
        if self.args.should_save and path.is_file() and has_fp32_state_dict(model):
            model.config.dtype = "float32"
            model.config.save_pretrained(path.parent)

    def compute_loss_context_manager(self) -> ExitStack:
        """The casts of the level around the forward pass and the loss."""
        stack = super().compute_loss_context_manager()
        stack.enter_context(self.accelerator.autocast())
        return stack
