"""EpochBasedRunner and IterBasedRunner with OptimizerHook or Fp16OptimizerHook, from configuration dicts.

python runner.py --mode master --dtype bfloat16
python runner.py --by-iter --mode autocast --accumulate 2
python runner.py --epochs 6 --resume-from output/latest.pth
torchrun --nproc-per-node 2 runner.py --batch 32
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import Any

import torch
from digits import Classifier, loaders

from halfpeak.runner import MMDistributedDataParallel, build_runner, get_dist_info, init_dist

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--by-iter", action="store_true", help="IterBasedRunner, instead of EpochBasedRunner")
parser.add_argument("--mode", choices=("float32", "autocast", "master"), default="master")
parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--resume-from")
parser.add_argument("--output", default="output")
args = parser.parse_args()

accelerator = torch.accelerator.current_accelerator(check_available=True)
device = accelerator or torch.device("cpu")
if "WORLD_SIZE" in os.environ:  # torchrun sets it
    init_dist("pytorch", backend=torch.distributed.get_default_backend_for_device(device.type))
rank, ranks = get_dist_info()
logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")

torch.manual_seed(0)
training, held_out = loaders(args.batch, device, ranks)
model = Classifier().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

optimizer_config: dict[str, Any] = {"grad_clip": {"max_norm": 5.0}}
if args.mode == "float32":
    optimizer_config["type"] = "OptimizerHook"
else:
    scale = {"init_scale": 2.0**16} if args.dtype == "float16" else 1.0
    optimizer_config |= {
        "type": "Fp16OptimizerHook",
        "mode": args.mode,
        "dtype": args.dtype,
        "loss_scale": scale,
    }
if args.accumulate > 1:
    optimizer_config["type"] = f"GradientCumulative{optimizer_config['type']}"
    optimizer_config["cumulative_iters"] = args.accumulate

length = {"max_iters": args.epochs * len(training)} if args.by_iter else {"max_epochs": args.epochs}
runner = build_runner(
    {"type": "IterBasedRunner" if args.by_iter else "EpochBasedRunner", **length},
    default_args={
        "model": MMDistributedDataParallel(model) if ranks > 1 else model,
        "optimizer": optimizer,
        "work_dir": args.output,
        "logger": logging.getLogger("runner"),
    },
)
runner.register_training_hooks(
    lr_config={"policy": "CosineAnnealing", "min_lr_ratio": 0.01, "by_epoch": False},
    optimizer_config=optimizer_config,
    checkpoint_config={"interval": len(training) if args.by_iter else 1},
    log_config={"interval": 10, "hooks": [{"type": "TextLoggerHook", "by_epoch": not args.by_iter}]},
    custom_hooks_config=[{"type": "DistSamplerSeedHook"}] if ranks > 1 else None,
)
if args.resume_from:
    runner.resume(args.resume_from)
# Training and validation alternate, in the same dtype; lengths count epochs, or iterations with --by-iter.
lengths = (len(training), len(held_out)) if args.by_iter else (1, 1)
runner.run([training, held_out], list(zip(("train", "val"), lengths, strict=True)))
if rank == 0:
    print(f"{runner.steps} steps, validation {runner.outputs['log_vars']['accuracy'].item():.3f}")
if ranks > 1:
    torch.distributed.destroy_process_group()
