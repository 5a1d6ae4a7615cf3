"""Trains with old releases that support apex, unchanged, on the shim and a CPU. Run by hand; CI does not.

Install each release into its own folder; it uses the torch of the test environment::

    pip install --no-deps --target old/lightning pytorch-lightning==1.9.5 setuptools==69.5.1
    pip install --no-deps --target old/transformers transformers==4.41.2 accelerate==0.34.2 \\
        tokenizers==0.19.1 huggingface_hub==0.26.5
    PYTHONPATH=old/lightning:src:tests python tests/integrations/old_releases.py lightning O2
    PYTHONPATH=old/transformers:src:tests python tests/integrations/old_releases.py transformers O2

Results with torch 2.13 on Python 3.11, at O1 and at O2:

- pytorch-lightning 1.9.5 (``ApexMixedPrecisionPlugin``, clipping): the weights of a plain loop over an engine, bit for bit.
  It needs a setuptools that still has ``pkg_resources``. ``Trainer(precision=16, amp_backend="apex")`` itself refuses a
  CPU, so the plugin is passed.
- transformers 4.41.2 (``fp16=True, half_precision_backend="apex"``): trains; the loss falls, and logged norms are unscaled.
- transformers 4.46.3: fails by itself, with any apex: its ``training_step`` returns None where it uses apex.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import halfpeak
import halfpeak.shim


def run_lightning(level: str) -> None:
    """Compare a fit with Lightning's own apex plugin with a plain loop over an engine."""
    import pytorch_lightning
    from pytorch_lightning.plugins import ApexMixedPrecisionPlugin

    from integrations.plain_loop import loader, make_module, make_trainer, plain_run

    class Module(type(make_module(pytorch_lightning))):  # type: ignore[misc]
        """Calls itself in ``training_step``, because apex casts at the boundary of the module that it is given."""

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.criterion(self(batch[0]).float(), batch[1])

    module = Module()
    trainer = make_trainer(pytorch_lightning, ApexMixedPrecisionPlugin(level), gradient_clip_val=0.01)
    trainer.fit(module, loader())
    from apex import amp

    expected, engine = plain_run(
        level,
        scale=halfpeak.ScaleConfig(),
        clip=lambda parameters: nn.utils.clip_grad_norm_(list(parameters), 0.01),
    )
    found = module.net.state_dict()
    different = [name for name in expected if not torch.equal(found[name].float(), expected[name])]
    print(
        "pytorch-lightning", pytorch_lightning.__version__, level, amp.state_dict(), "different:", different
    )
    assert not different
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == engine.read_scale()


def run_transformers(level: str) -> None:
    """Train a small classifier with the Trainer's own apex code."""
    import transformers

    assert transformers.utils.is_apex_available()
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 8}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes, **dropout)
    tokens = torch.randint(32, (32, 6))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=48,
            lr_scheduler_type="constant",
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            adam_epsilon=1e-4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=4,
            fp16=True,
            half_precision_backend="apex",
            fp16_opt_level=level,
        )
        data = [{"input_ids": row, "labels": int(row[0] > 15)} for row in tokens]
        trainer = transformers.Trainer(
            transformers.BertForSequenceClassification(config), arguments, train_dataset=data
        )
        assert trainer.use_apex
        trainer.train()
    from apex import amp

    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(
        "transformers", transformers.__version__, level, amp.state_dict(), [entry["loss"] for entry in logged]
    )
    assert logged[-1]["loss"] < 0.5 * logged[0]["loss"]
    assert all(entry["grad_norm"] < 100 for entry in logged)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    halfpeak.shim.install()
    {"lightning": run_lightning, "transformers": run_transformers}[sys.argv[1]](sys.argv[2])
