"""A training script for mmengine as users write it, without halfpeak's names: digits, and two wrappers.

python -m halfpeak run --shim mmengine mmengine_script WORK_DIR
"""

# ruff: noqa: C408 - dict(...) is how configurations of mmengine are written

import json
import sys
from pathlib import Path

import torch
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapperDict
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS, OPTIMIZERS
from mmengine.runner import Runner
from sklearn.datasets import load_digits
from torch import nn


class Digits(BaseModel):
    """Trains its two parts by two wrappers, as a generator and a discriminator are trained."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 8, 3)
        self.head = nn.Linear(8 * 6 * 6, 10)

    def forward(self, inputs, data_samples=None, mode="tensor"):
        scores = self.head(torch.relu(self.body(torch.stack(inputs))).flatten(1))
        labels = torch.as_tensor(data_samples, device=scores.device)
        return dict(loss=nn.functional.cross_entropy(scores.float(), labels))

    def train_step(self, data, optim_wrapper):
        body = optim_wrapper["body"]
        self.train_only("body")
        with body.optim_context(self):
            data = self.data_preprocessor(data, True)
            loss = self(**data, mode="loss")["loss"]
        body.backward(body.scale_loss(loss))
        if body.should_update():
            body.step()
            body.zero_grad()
        self.train_only("head")
        with optim_wrapper["head"].optim_context(self):
            loss = self(**data, mode="loss")["loss"]
        optim_wrapper["head"].update_params(loss)
        return dict(loss=loss.detach())

    def train_only(self, name):
        for part in ("body", "head"):
            getattr(self, part).requires_grad_(part == name)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class OneForEachPart:
    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        self.cfg = optim_wrapper_cfg

    def __call__(self, model):
        wrappers = {}
        for name in ("body", "head"):
            cfg = dict(self.cfg[name])
            optimizer = OPTIMIZERS.build(
                {**cfg.pop("optimizer"), "params": getattr(model, name).parameters()}
            )
            wrappers[name] = OPTIM_WRAPPERS.build({**cfg, "optimizer": optimizer})
        return OptimWrapperDict(**wrappers)


def main(work_dir):
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images[:640, None] / 16, dtype=torch.float32)
    samples = [dict(inputs=image, data_samples=int(y)) for image, y in zip(images, digits.target)]  # noqa: B905
    body = dict(
        type="AmpOptimWrapper", dtype="float16", accumulative_counts=2, optimizer=dict(type="SGD", lr=0.1)
    )
    head = dict(type="OptimWrapper", optimizer=dict(type="Adam", lr=3e-3))
    runner = Runner(
        model=Digits(),
        work_dir=work_dir,
        train_dataloader=dict(
            batch_size=32, sampler=dict(type="DefaultSampler", shuffle=True), dataset=samples
        ),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(constructor="OneForEachPart", body=body, head=head),
        randomness=dict(seed=0),
        log_level="ERROR",
    )
    runner.train()
    result = dict(
        loss=[float(loss) for loss in runner.message_hub.get_scalar("train/loss").data[0]],
        lr=sorted(name for name in runner.message_hub.log_scalars if name.endswith("lr")),
        wrappers=[type(wrapper).__module__.partition(".")[0] for wrapper in runner.optim_wrapper.values()],
        device=str(next(runner.model.parameters()).device),
    )
    Path(work_dir, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
