"""Runs of mmengine's own Runner on digits, with and without interruption, and the same steps in a plain loop.

A separate process, because mmengine's loggers, hubs and registries live as long as the process. Writes its results as
JSON to FILE.

    python mmengine_runs (mmengine | apex) FILE
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import halfpeak.optim
import halfpeak.shim

# "mmengine": halfpeak's wrappers in its registries; "apex": mmengine's own ApexOptimWrapper over halfpeak's apex.
SHIM = sys.argv[1]
halfpeak.shim.install(SHIM)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mmengine.evaluator import BaseMetric
    from mmengine.hooks import Hook
    from mmengine.logging import MessageHub
    from mmengine.model import BaseModel
    from mmengine.optim import LinearLR
    from mmengine.runner import Runner

WRAPPERS: dict[str, dict[str, Any]] = {
    "OptimWrapper": {},  # what mmengine makes of a configuration without a type
    "AmpOptimWrapper float16": {
        "type": "AmpOptimWrapper",
        "dtype": "float16",
        "loss_scale": {"init_scale": 1024.0},
    },
    "ApexOptimWrapper O1": {"type": "ApexOptimWrapper", "opt_level": "O1"},
    "ApexOptimWrapper O2": {"type": "ApexOptimWrapper", "opt_level": "O2"},
}
AVERAGED = ("O1", "O2", "O3", "O5")
BATCH, BATCHES, EPOCHS, EVERY = 32, 10, 2, 3
COUNT = itertools.count()


class Net(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 6 * 6, 10)

    def forward(self, inputs: list[Tensor], data_samples: list[int], mode: str = "tensor") -> Any:
        x = torch.stack(list(inputs)).to(self.conv.weight.dtype)
        scores = self.head(torch.relu(self.norm(self.conv(x))).flatten(1))
        if mode == "loss":
            return {"loss": functional.cross_entropy(scores.float(), torch.tensor(data_samples))}
        if mode == "predict":
            return [{"right": int(s.argmax()) == t} for s, t in zip(scores, data_samples, strict=True)]
        return scores


class Accuracy(BaseMetric):
    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [float(sample["right"]) for sample in data_samples]

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        return {"accuracy": float(np.mean(results))}


class Epochs(Hook):
    def __init__(self) -> None:
        self.trained: list[int] = []

    def before_train_epoch(self, runner: Runner) -> None:
        self.trained.append(runner.epoch)


def samples(begin: int, end: int) -> list[dict[str, Any]]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return [{"inputs": images[i], "data_samples": int(digits.target[i])} for i in range(begin, end)]


def config(wrapper: dict[str, Any]) -> dict[str, Any]:
    return {
        "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
        "accumulative_counts": EVERY,
        "clip_grad": {"max_norm": 5.0},
        "paramwise_cfg": {"norm_decay_mult": 0.0},
        **wrapper,
    }


def train(
    work_dir: Path,
    wrapper: dict[str, Any],
    *,
    shuffle: bool = False,
    hooks: tuple[Any, ...] = (),
    resume: bool = False,
) -> Runner:
    """Train with mmengine's Runner from a configuration that names nothing of halfpeak's."""
    torch.manual_seed(0)
    runner = Runner(
        model=Net(),
        work_dir=str(work_dir),
        train_dataloader={
            "batch_size": BATCH,
            "num_workers": 0,
            "sampler": {"type": "DefaultSampler", "shuffle": shuffle},
            "dataset": samples(0, BATCH * BATCHES),
        },
        val_dataloader={
            "batch_size": 64,
            "num_workers": 0,
            "sampler": {"type": "DefaultSampler", "shuffle": False},
            "dataset": samples(1000, 1256),
        },
        train_cfg={"by_epoch": True, "max_epochs": EPOCHS, "val_interval": 1},
        val_cfg={},
        val_evaluator={"type": Accuracy},
        optim_wrapper=config(wrapper),
        param_scheduler=[{"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 8}],
        default_hooks={
            "checkpoint": {"type": "CheckpointHook", "interval": 1},
            "logger": {"type": "LoggerHook", "interval": 1},
        },
        custom_hooks=list(hooks),
        resume=resume,
        log_level="ERROR",
        randomness={"seed": 1},
        experiment_name=f"run{next(COUNT)}",
    )
    runner.train()
    return runner


def by_hand(wrapper: dict[str, Any]) -> dict[str, Tensor]:
    """The same steps in a plain loop, with halfpeak's wrapper and without mmengine's registries."""
    torch.manual_seed(0)
    model = Net()
    optim = halfpeak.optim.build_optim_wrapper(model, config(wrapper))
    schedule = LinearLR(optim, start_factor=0.1, by_epoch=False, begin=0, end=8)
    optim.initialize_count_status(model, 0, BATCHES * EPOCHS)
    data = samples(0, BATCH * BATCHES)
    model.train()
    for _, begin in itertools.product(range(EPOCHS), range(0, len(data), BATCH)):
        batch = data[begin : begin + BATCH]
        with optim.optim_context(model):
            loss = model([s["inputs"] for s in batch], [s["data_samples"] for s in batch], mode="loss")[
                "loss"
            ]
        optim.update_params(loss)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # mmengine's warning of a step inside a window, which the shim's class avoids
            schedule.step()
    return weights(model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def loop(root: Path, wrapper: dict[str, Any]) -> dict[str, Any]:
    runner = train(root, wrapper)
    hub = MessageHub.get_current_instance()
    losses = [float(loss) for loss in hub.get_scalar("train/loss").data[0]]
    logged = [
        json.loads(line) for line in next(root.glob("*/vis_data/scalars.json")).read_text().splitlines()
    ]
    return {
        "wrapper": [type(runner.optim_wrapper).__module__, type(runner.optim_wrapper).__name__],
        "first": float(np.mean(losses[:3])),
        "last": float(np.mean(losses[-3:])),
        "accuracy": hub.get_scalar("val/accuracy").current(),
        "norms": len(hub.get_scalar("train/grad_norm").data[0]),
        "lr": [float(lr) for lr in hub.get_scalar("train/lr").data[0]],
        "logged": sorted({key for line in logged for key in line}),
        "equal": same(weights(runner.model), by_hand(wrapper)),
    }


def resumed(root: Path, wrapper: dict[str, Any], hooks: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Compare a run of two epochs with one resumed from the file of the first epoch, which ends inside a window."""
    whole = train(root / "whole", wrapper, shuffle=True, hooks=hooks)
    part = root / "part"
    part.mkdir()
    shutil.copy(root / "whole/epoch_1.pth", part)
    (part / "last_checkpoint").write_text(str(part / "epoch_1.pth"))
    window = "halfpeak" in torch.load(part / "epoch_1.pth", weights_only=False)["optimizer"]
    epochs = Epochs()
    rest = train(part, wrapper, shuffle=True, hooks=(*hooks, epochs), resume=True)
    one, other = (torch.load(path / "epoch_2.pth", weights_only=False) for path in (root / "whole", part))
    states = [file["optimizer"]["state"] for file in (one, other)]
    averages = "ema_state_dict"
    return {
        "trained": epochs.trained,
        "window": window,
        "weights": same(weights(whole.model), weights(rest.model)),
        "momenta": states[0].keys() == states[1].keys()
        and all(same(states[0][index], states[1][index]) for index in states[0]),
        "averages": same(one[averages], other[averages]) if hooks else None,
    }


def diagnosed(root: Path, wrapper: dict[str, Any]) -> list[list[Any]]:
    """The reports on a run in which one layer overflows in float16 once, in the fourth iteration."""
    calls = itertools.count()

    class Spoilt(Hook):
        def before_train(self, runner: Runner) -> None:
            runner.model.norm.register_forward_hook(
                lambda norm, args, out: out * 1e5 if norm.training and next(calls) in (3, 4, 5) else out
            )

    train(root, {**wrapper, "accumulative_counts": 1}, hooks=({"type": "DiagnosisHook"}, Spoilt()))
    reports = [json.loads(path.read_text()) for path in sorted(root.glob("diagnosis-*.json"))]
    return [[one["where"], one["module"], one["reason"]] for one in reports]


def averaged(root: Path, level: str) -> dict[str, Any]:
    """The distance of ``EMAHook``'s averages from exact ones, after two validations, and of those that these evaluated."""
    exact: dict[str, Tensor] = {}
    evaluated: list[bool] = []

    class Checked(Hook):
        priority = "VERY_LOW"

        def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
            for name, value in runner.model.state_dict().items():
                exact[name] = 0.95 * exact.get(name, value.double()) + 0.05 * value.double()

        def before_val_epoch(self, runner: Runner) -> None:
            state = averages_of(runner).module.state_dict()
            evaluated.append(same(dict(runner.model.state_dict()), dict(state)))

    def averages_of(runner: Runner) -> Any:
        (hook,) = (hook for hook in runner.hooks if type(hook).__name__ == "EMAHook")
        return hook.ema_model

    wrapper = {"type": "ApexOptimWrapper", "opt_level": level}
    hooks = ({"type": "EMAHook", "momentum": 0.05, "update_buffers": True}, Checked())
    plain, runner = train(root / "plain", wrapper), train(root / "averaged", wrapper, hooks=hooks)
    averages = dict(averages_of(runner).module.named_parameters())
    try:
        train(root / "refused", wrapper, hooks=({"type": "EMAHook"},))
        refused = ""
    except halfpeak.ConfigError as error:
        refused = str(error)
    return {
        "weights": same(weights(runner.model), weights(plain.model)),
        "distance": max(
            float((value.detach().double() - exact[name]).abs().max()) for name, value in averages.items()
        ),
        "evaluated": evaluated,
        "refused": refused,
    }


def our_wrappers(root: Path) -> dict[str, Any]:
    found = {f"loop {name}": loop(root / f"loop {name}", wrapper) for name, wrapper in WRAPPERS.items()}
    # At O2 the weights are half and the averages are not; the state dict of the model has float32 for both.
    ema = {"type": "EMAHook", "momentum": 0.05, "update_buffers": True}
    for name, hooks in (("AmpOptimWrapper float16", ()), ("ApexOptimWrapper O2", (ema,))):
        found[f"resume {name}"] = resumed(root / f"resume {name}", WRAPPERS[name], hooks)
    for name in ("AmpOptimWrapper float16", "ApexOptimWrapper O2"):
        found[f"diagnosed {name}"] = diagnosed(root / f"diagnosed {name}", WRAPPERS[name])
    found |= {f"averages {level}": averaged(root / f"averages {level}", level) for level in AVERAGED}
    return found


def own_apex_wrapper(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("ApexOptimWrapper O1", "ApexOptimWrapper O2"):
        found[f"loop {name}"] = loop(root / f"loop {name}", WRAPPERS[name])
        # The state of mmengine's ApexOptimWrapper cannot hold an open window.
        found[f"resume {name}"] = resumed(
            root / f"resume {name}", {**WRAPPERS[name], "accumulative_counts": 1}
        )
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        found = own_apex_wrapper(root) if SHIM == "apex" else our_wrappers(root)
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
