"""Data and models of the recipes, their training steps, validation and state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halfpeak.core.errors import ConfigError, StateError
from halfpeak.recipes.catalog import build_config, build_recipe, complete
from halfpeak.recipes.digits import Digits
from halfpeak.recipes.pysource import SHAPES, ByteGPT, PySource, Shape
from halfpeak.recipes.training import Training
from reliability.support import state_hash

CPU = torch.device("cpu")


def training(**values: object) -> Training:
    config = build_config(values)
    recipe = build_recipe(config, CPU)
    config, sampler = complete(config, recipe)
    return Training(config, recipe, sampler, CPU)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(60):
        (tmp_path / f"module{number}.py").write_text(f"value = {number}\n" * 40)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "foreign.py").write_text("foreign = 1\n" * 1000)
    return tmp_path


def test_digits_holds_a_fifth_of_every_class_out() -> None:
    recipe = Digits(CPU)
    (held_out,) = recipe.validation()
    assert recipe.samples + len(held_out.targets) == 1797
    assert held_out.targets.bincount().tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert Digits(CPU).fingerprint == recipe.fingerprint
    images, labels = recipe.batch(torch.tensor([0, 5]))
    assert images.shape == (2, 1, 8, 8)
    assert labels.dtype == torch.int64


def test_pysource_separates_files_and_leaves_other_packages_out(library: Path) -> None:
    recipe = PySource("tiny", 16, 8, CPU, library)
    inputs, targets = recipe.batch(torch.tensor([0, recipe.samples - 1]))
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    texts = [bytes(recipe._training.tolist()), bytes(recipe._held_out.tolist())]
    assert all(b"foreign" not in text for text in texts)
    files = [set(text.strip(b"\0").split(b"\0")) for text in texts]
    assert len(files[0] | files[1]) == 60
    assert not files[0] & files[1]


def test_pysource_validates_on_the_same_windows_each_time(library: Path) -> None:
    recipe = PySource("tiny", 16, 8, CPU, library)
    first, second = list(recipe.validation()), list(recipe.validation())
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, second, strict=True))
    assert sum(len(batch.targets) for batch in first) == recipe._held_out_samples


def test_pysource_refuses_a_context_longer_than_its_text(library: Path) -> None:
    with pytest.raises(ConfigError, match="context=1000000"):
        PySource("tiny", 1_000_000, 8, CPU, library)


def test_pysource_without_python_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too little Python source"):
        PySource("tiny", 16, 8, CPU, tmp_path)


def test_the_transformer_sees_no_later_byte() -> None:
    model = ByteGPT(Shape(2, 16, 2), 8)
    text = torch.randint(0, 256, (1, 8))
    changed = text.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_large_has_the_shape_of_gpt2() -> None:
    with torch.device("meta"):
        model = ByteGPT(SHAPES["large"], 1024)
    assert sum(parameter.numel() for parameter in model.blocks.parameters()) == 85_054_464


def test_the_learning_rate_follows_real_steps_only() -> None:
    run = training(level="O2", init_loss_scale=2.0**24, steps=8, batch=8, warmup=4)
    rates = [run.advance() for _ in range(8)]
    skipped = [bool(step.scalars["skipped"]) for step in rates]
    assert skipped[0]
    assert not all(skipped)
    taken = 0
    for step, was_skipped in zip(rates, skipped, strict=True):
        assert step.known["lr"] == pytest.approx(0.1 * min(4, taken + 1) / 4, rel=0.5 if taken > 4 else 1e-12)
        taken += not was_skipped
    run.state_dict()
    assert run.num_steps == taken


@pytest.mark.parametrize(
    ("values", "warmup"),
    [
        ({}, 22),
        ({"steps": 20}, 2),
        ({"steps": 9}, 0),
        ({"steps": 20, "warmup": 22}, 22),
        ({"steps": 20, "warmup": 0}, 0),
        ({"steps": 20, "schedule_steps": 100}, 10),
    ],
)
def test_a_short_run_warms_up_for_a_tenth_unless_told(values: dict[str, int], warmup: int) -> None:
    config, _ = complete(build_config(values), Digits(CPU))
    assert config.warmup == warmup


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.01}, {"clip_value": 1e-4}])
def test_the_gradient_norm_is_reported_before_any_clipping(clip: dict[str, float]) -> None:
    unclipped = training(level="O0", steps=1, batch=8).advance().scalars["grad_norm"]
    assert torch.equal(
        training(level="O0", steps=1, batch=8, **clip).advance().scalars["grad_norm"], unclipped
    )


def test_accumulation_takes_the_mean_of_its_batches() -> None:
    """With frozen batch-norm statistics, a step over 2 x 8 samples equals a step over 16."""

    def step(batch: int, accumulate: int) -> tuple[torch.Tensor, torch.Tensor]:
        run = training(level="O0", steps=1, batch=batch, accumulate=accumulate, warmup=0)
        run.model.eval()
        scalars = run.advance().scalars
        return scalars["loss"], torch.cat([p.detach().flatten() for p in run.model.parameters()])

    (loss, weights), (split_loss, split_weights) = step(16, 1), step(8, 2)
    torch.testing.assert_close(split_loss, loss)
    torch.testing.assert_close(split_weights, weights)


@pytest.mark.parametrize(
    "part", [{"random": {"python": 3}}, {"random": {}}, {"driver": {}}, {"step": -1}, {"environment": None}]
)
def test_a_state_that_is_refused_leaves_training_as_it_was(part: dict[str, object]) -> None:
    source = training(steps=4, level="O2")
    source.advance()
    state, target = source.state_dict(), training(steps=4, level="O2")
    before = state_hash(target.state_dict())
    with pytest.raises(StateError):
        target.load_state_dict({**state, **part})
    assert state_hash(target.state_dict()) == before
    target.load_state_dict(state)
    assert state_hash(target.state_dict()) == state_hash(state)


def test_validation_leaves_training_as_it_was() -> None:
    def losses(*, validate: bool) -> list[float]:
        run = training(level="O5", steps=3, batch=8)
        found: list[float] = []
        for _ in range(3):
            found.append(float(run.advance().scalars["loss"]))
            if validate:
                assert 0 <= float(run.validate().scalars["validation_accuracy"]) <= 1
                assert run.model.training
        return found

    assert losses(validate=True) == losses(validate=False)
