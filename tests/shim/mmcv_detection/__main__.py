"""A detector on digits as users wrote it for mmcv 1.x and mmdetection 2.x: registries, configs, a custom runner.

Each image is a canvas of 12x12 pixels with one digit somewhere on it; the model says which digit it is and where. Nothing
in this file knows of halfpeak:

    python -m halfpeak run --shim mmcv --shim apex mmcv_detection --fp16 hook --work-dir DIR
"""

# ruff: noqa: C408 - dict(...) is how configurations of mmcv are written

import argparse
import json
import os.path as osp

import mmcv
import numpy as np
import torch
from mmcv.parallel import MMDataParallel
from mmcv.runner import (
    HOOKS,
    RUNNERS,
    BaseModule,
    EpochBasedRunner,
    OptimizerHook,
    auto_fp16,
    build_optimizer,
    build_runner,
    force_fp32,
    get_dist_info,
    set_random_seed,
)
from mmcv.utils import Registry, build_from_cfg, get_logger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

try:
    from apex import amp
except ImportError:
    amp = None

BACKBONES = Registry("backbone")
HEADS = Registry("head")
DETECTORS = Registry("detector")


class DigitsOnCanvas(Dataset):
    def __init__(self, begin, end):
        digits = load_digits()
        random = np.random.RandomState(begin)
        self.samples = []
        for image, label in zip(digits.images[begin:end], digits.target[begin:end]):  # noqa: B905
            top, left = random.randint(0, 5, size=2)
            canvas = np.zeros((1, 12, 12), dtype=np.float32)
            canvas[0, top : top + 8, left : left + 8] = image / 16
            self.samples.append((canvas, int(label), np.array([top, left], dtype=np.float32) / 4))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        canvas, label, corner = self.samples[index]
        return dict(img=torch.from_numpy(canvas), gt_label=label, gt_corner=torch.from_numpy(corner))


@BACKBONES.register_module()
class SmallConvNet(BaseModule):
    def __init__(self, width=16, init_cfg=None):
        super().__init__(init_cfg)
        self.fp16_enabled = False
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU()),
                nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2), nn.BatchNorm2d(2 * width), nn.ReLU()),
            ]
        )

    @auto_fp16()
    def forward(self, x):
        outs = []
        for stage in self.stages:
            x = stage(x)
            outs.append(x)
        return tuple(outs)


@HEADS.register_module()
class DigitHead(BaseModule):
    def __init__(self, in_channels, num_classes=10, init_cfg=None):
        super().__init__(init_cfg)
        self.fp16_enabled = False
        self.classify = nn.Linear(in_channels * 16, num_classes)
        self.locate = nn.Linear(in_channels * 16, 2)

    @auto_fp16()
    def forward(self, feats):
        flat = feats[-1].flatten(1)
        return self.classify(flat), self.locate(flat)

    @force_fp32(apply_to=("cls_score", "corner_pred"))
    def loss(self, cls_score, corner_pred, gt_label, gt_corner):
        assert not self.fp16_enabled or cls_score.dtype == torch.float32
        return dict(
            loss_cls=nn.functional.cross_entropy(cls_score, gt_label),
            loss_corner=nn.functional.smooth_l1_loss(corner_pred, gt_corner),
            acc=(cls_score.argmax(1) == gt_label).float().mean(),
        )


@DETECTORS.register_module()
class DigitDetector(BaseModule):
    def __init__(self, backbone, head, init_cfg=None):
        super().__init__(init_cfg)
        self.fp16_enabled = False
        self.backbone = build_from_cfg(backbone, BACKBONES)
        self.head = build_from_cfg(head, HEADS)

    @auto_fp16(apply_to=("img",))
    def forward(self, img, gt_label, gt_corner):
        return self.head.loss(*self.head(self.backbone(img)), gt_label, gt_corner)

    def train_step(self, data, optimizer):
        losses = self(**data)
        loss = sum(value for name, value in losses.items() if "loss" in name)
        log_vars = {name: value.item() for name, value in losses.items()}
        log_vars["loss"] = loss.item()
        return dict(loss=loss, log_vars=log_vars, num_samples=len(data["img"]))


@HOOKS.register_module()
class ApexHook(OptimizerHook):
    """Steps once in ``every`` iterations, with gradients that apex has unscaled."""

    def __init__(self, every, **kwargs):
        super().__init__(**kwargs)
        self.every = every

    def before_run(self, runner):
        runner.optimizer.zero_grad()

    def after_train_iter(self, runner):
        with amp.scale_loss(runner.outputs["loss"] / self.every, runner.optimizer) as scaled:
            scaled.backward()
        if not self.every_n_iters(runner, self.every):
            return
        self.clip_grads(amp.master_params(runner.optimizer))
        runner.optimizer.step()
        runner.optimizer.zero_grad()


@RUNNERS.register_module()
class ApexRunner(EpochBasedRunner):
    """Its checkpoints hold the state of apex, too."""

    def save_checkpoint(self, out_dir, filename_tmpl="epoch_{}.pth", **unused):
        done = self.epoch + 1
        name = filename_tmpl.format(done)
        states = dict(
            state_dict=self.model.module.state_dict(),
            optimizer=self.optimizer.state_dict(),
            amp=amp.state_dict(),
        )
        mmcv.mkdir_or_exist(out_dir)
        torch.save(dict(states, meta=dict(epoch=done, iter=self.iter)), osp.join(out_dir, name))
        mmcv.symlink(name, osp.join(out_dir, "latest.pth"))

    def resume(self, checkpoint, **unused):
        saved = self.load_checkpoint(checkpoint, map_location="cpu")
        self.optimizer.load_state_dict(saved["optimizer"])
        amp.load_state_dict(saved["amp"])
        self._epoch, self._iter = saved["meta"]["epoch"], saved["meta"]["iter"]


model_cfg = dict(
    type="DigitDetector",
    backbone=dict(type="SmallConvNet", width=16),
    head=dict(type="DigitHead", in_channels=32),
)
optimizer_cfg = dict(
    type="AdamW",
    lr=5e-3,
    weight_decay=0.05,
    paramwise_cfg=dict(norm_decay_mult=0.0, custom_keys={"head": dict(lr_mult=2.0)}),
)
lr_config = dict(policy="step", warmup="linear", warmup_iters=3, warmup_ratio=0.1, step=[2])
checkpoint_config = dict(interval=1)
log_config = dict(interval=1, hooks=[dict(type="TextLoggerHook")])
OPTIMIZER_CONFIGS = {
    "hook": dict(type="Fp16OptimizerHook", grad_clip=dict(max_norm=10, norm_type=2), loss_scale=512.0),
    "apex": dict(type="ApexHook", every=2, grad_clip=dict(max_norm=10, norm_type=2)),
}


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", required=True)
    parser.add_argument("--fp16", choices=list(OPTIMIZER_CONFIGS), default="hook")
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--resume-from")
    return parser.parse_args()


def main():
    args = parse_args()
    assert tuple(int(part) for part in mmcv.__version__.split(".")[:2]) >= (1, 3)
    mmcv.mkdir_or_exist(args.work_dir)
    logger = get_logger("digits", log_file=osp.join(args.work_dir, "run.log"))
    set_random_seed(0, deterministic=True)
    rank, _ = get_dist_info()
    logger.info("rank %d", rank)

    model = build_from_cfg(model_cfg, DETECTORS)
    model.init_weights()
    optimizer = build_optimizer(model, optimizer_cfg)
    if args.fp16 == "apex":
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, verbosity=0)
    device_ids = [0] if torch.cuda.is_available() else [-1]
    runner = build_runner(
        dict(
            type="ApexRunner" if args.fp16 == "apex" else "EpochBasedRunner",
            max_epochs=3,
        ),
        default_args=dict(
            model=MMDataParallel(model, device_ids=device_ids),
            optimizer=optimizer,
            work_dir=args.work_dir,
            logger=logger,
            meta=dict(seed=0),
        ),
    )
    runner.register_training_hooks(lr_config, OPTIMIZER_CONFIGS[args.fp16], checkpoint_config, log_config)
    if args.resume_from:
        runner.resume(args.resume_from)
    loader = DataLoader(DigitsOnCanvas(0, 640), batch_size=64, shuffle=False, drop_last=True)
    runner.run([loader], [("train", 1)])

    with open(osp.join(args.work_dir, "result.json"), "w") as file:
        json.dump(dict(dtype=str(model.backbone.stages[0][0].weight.dtype), iter=runner.iter), file)
    torch.save(model.state_dict(), osp.join(args.work_dir, "weights.pth"))


if __name__ == "__main__":
    main()
