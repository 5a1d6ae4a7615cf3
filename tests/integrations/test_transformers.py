"""HalfpeakTrainer: transformers' Trainer at an opt level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import halfpeak
from halfpeak.core.suitable import suitable_level
from support.nets import LEVELS, MASTERED

transformers = pytest.importorskip("transformers")


from halfpeak.integrations.transformers import HalfpeakTrainer  # noqa: E402


def make_model() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def make_data() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32, (32, 6), generator=generator)
    return [{"input_ids": row, "labels": int(row[0] > 15)} for row in tokens]


def make_trainer(folder: Path, level: str, steps: int = 8, model: Any = None, **arguments: Any) -> Any:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "adam_epsilon": 1e-4,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "max_grad_norm": 0.5,
    }
    return HalfpeakTrainer(
        model if model is not None else make_model(),
        transformers.TrainingArguments(**{**options, **arguments}),
        train_dataset=make_data(),
        level=level,
        options={"scale": halfpeak.ScaleConfig(init=2.0**10)},
    )


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("level", LEVELS)
def test_it_learns_at_every_level(level: str, tmp_path: Path) -> None:
    losses: list[float] = []

    def keep(loss: torch.Tensor) -> torch.Tensor:
        losses.append(loss.item())
        return loss

    trainer = make_trainer(tmp_path, level, steps=24)
    compute = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: keep(compute(*args, **kwargs))
    trainer.train()
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert {value.dtype for value in weights(trainer).values() if value.is_floating_point()} == {
        torch.float32
    }
    assert trainer.accelerator.adapter.engine.policy.masters is (level in ("O2", "O5"))


def test_the_default_level_suits_the_device(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    trainer = HalfpeakTrainer(make_model(), arguments, train_dataset=make_data())
    trainer.train()
    assert trainer.accelerator.adapter.level is halfpeak.LEVELS[suitable_level("cpu").level]


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_skipped_step_moves_no_scheduler_and_norms_have_true_size(level: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, level, logging_strategy="steps", logging_steps=1)
    compute = trainer.compute_loss
    passes = 0

    def overflow(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return compute(*args, **kwargs) * (torch.inf if passes == 3 else 1.0)

    trainer.compute_loss = overflow
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == 7
    counters = trainer.accelerator.scaler.state_dict()["counters"]
    assert counters == {"micro_step": 8, "num_steps": 7, "num_skipped": 1}
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == 8
    assert all(0 < norm < 50 for number, norm in enumerate(norms) if number != 2)
    assert all(value.isfinite().all() for value in weights(trainer).values())


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_resumed_run_goes_on_bit_for_bit(level: str, tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", level, gradient_accumulation_steps=2)
    whole.train()
    half = make_trainer(
        tmp_path / "half", level, gradient_accumulation_steps=2, save_strategy="steps", save_steps=5
    )
    half.train()
    resumed = make_trainer(tmp_path / "half", level, gradient_accumulation_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-5"))
    for trainer in (half, resumed):
        found, expected = weights(trainer), weights(whole)
        assert not [name for name in found if not torch.equal(found[name], expected[name])]
        assert trainer.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()


def test_evaluation_and_a_second_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "O2", eval_strategy="no")
    trainer.train()
    exact = weights(trainer)
    assert trainer.evaluate(make_data())["eval_loss"] > 0
    trainer.train()
    assert trainer.accelerator.scaler.state_dict()["counters"]["micro_step"] == 16
    assert not torch.equal(weights(trainer)["classifier.weight"], exact["classifier.weight"])


@pytest.mark.parametrize("level", ["O1", *MASTERED])
def test_what_is_saved_is_loaded_in_float32_with_the_masters_values(level: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, level, save_strategy="steps", save_steps=8)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for folder in ("final", "checkpoint-8"):
        loaded = type(trainer.model).from_pretrained(tmp_path / folder)
        found, expected = loaded.state_dict(), weights(trainer)
        assert loaded.dtype is torch.float32
        assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_a_trainer_with_fp16_or_bf16_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(halfpeak.ConfigError, match="leave mixed_precision"):
        make_trainer(tmp_path, "O2", bf16=True)


def test_a_model_that_transformers_has_sharded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prepares the optimizer without the model."""
    model = make_model()
    monkeypatch.setattr(type(model), "is_distributed_loading_by_transformers", True, raising=False)
    with pytest.raises(halfpeak.ConfigError, match="has sharded the model by transformers itself"):
        make_trainer(tmp_path, "O2", model=model)
