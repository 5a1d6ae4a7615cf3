"""OptimWrapper, AmpOptimWrapper and ApexOptimWrapper, each from a configuration dict.

python optim_wrapper.py --wrapper ApexOptimWrapper --opt-level O2 --accumulate 2
python optim_wrapper.py --wrapper AmpOptimWrapper --dtype bfloat16 --epochs 4 --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from digits import Classifier, accuracy, loaders
from torch.nn.functional import cross_entropy

from halfpeak.checkpoint import load, save
from halfpeak.optim import build_optim_wrapper

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--wrapper", default="AmpOptimWrapper")
parser.add_argument("--opt-level", default="O2", help="of ApexOptimWrapper")
parser.add_argument("--dtype", default="float16", help="of AmpOptimWrapper")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--resume", action="store_true", help="go on from the file in --output")
parser.add_argument("--output", type=Path, default=Path("output"))
args = parser.parse_args()

# All three wrappers take these options; the lines below add each wrapper's own.
config: dict[str, Any] = {
    "type": args.wrapper,
    "optimizer": {"type": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
    "accumulative_counts": args.accumulate,
    "clip_grad": {"max_norm": 5.0},
    "paramwise_cfg": {"norm_decay_mult": 0.0},
}
if args.wrapper == "AmpOptimWrapper":
    config |= {"dtype": args.dtype, "loss_scale": "dynamic"}
if args.wrapper == "ApexOptimWrapper":
    config |= {"opt_level": args.opt_level, "loss_scale": "dynamic"}

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)
training, held_out = loaders(args.batch, device)
model = Classifier().to(device)
optim_wrapper = build_optim_wrapper(model, config)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optim_wrapper.optimizer, 0.7)
file = args.output / "checkpoint.pth"
done = 0
if args.resume:
    state = load(file)
    # ApexOptimWrapper converts the model in its first context, so enter one before loading states.
    with optim_wrapper.optim_context(model):
        model.load_state_dict(state["model"])
    optim_wrapper.load_state_dict(state["optim_wrapper"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"])
    done = state["epochs"]

# With the number of iterations, the wrapper divides the last, shorter window by its own length.
optim_wrapper.initialize_count_status(model, done * len(training), args.epochs * len(training))
for epoch in range(done + 1, args.epochs + 1):
    for images, labels in training:
        with optim_wrapper.optim_context(model):
            loss = cross_entropy(model(images).float(), labels)
        optim_wrapper.update_params(loss)
    scheduler.step()
    with optim_wrapper.optim_context(model):
        share = accuracy(model, held_out)
    print(f"epoch {epoch}: loss {loss.item():.6f}, accuracy {share:.3f}")
    args.output.mkdir(exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optim_wrapper": optim_wrapper.state_dict(),
        "scheduler": scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "epochs": epoch,
    }
    save(file, state)
