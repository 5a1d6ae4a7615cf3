"""One trunk, three tasks with a loss scale each, and gradients that are averaged over the ranks by hand.

python -m halfpeak run --device cpu multitask.py --opt-level O2
torchrun --nproc-per-node 2 -m halfpeak run --device cpu multitask.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel.distributed import flat_dist_call
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, smooth_l1_loss
from torch.nn.utils import clip_grad_norm_

TASKS = ("order", "maximum", "sum")  # a task's index is its loss_id
FEATURES, BATCH, ACCUMULATE = 8, 32, 4


class Net(nn.Module):
    """Returns the loss of one task on a batch of random features."""

    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.ReLU())
        self.heads = nn.ModuleDict({task: nn.Linear(width, 2 if task == "order" else 1) for task in TASKS})

    def forward(self, x, task):
        answer = self.heads[task](self.trunk(x)).float()
        if task == "order":
            return cross_entropy(answer, (x[:, 0] < x[:, 1]).long())
        if task == "maximum":
            return mse_loss(answer[:, 0], x.amax(1).float())
        return smooth_l1_loss(answer[:, 0], x.sum(1).float())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--steps", type=int, default=45)
    options = parser.parse_args()

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.manual_seed(20 + rank)
    model = Net().cuda()
    if ranks > 1:
        dist.init_process_group("nccl")
        flat_dist_call([p.data for p in model.parameters()], dist.broadcast, (0,))  # from rank 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level, num_losses=len(TASKS))
    optimizer.zero_grad()  # apex makes its master weights here; in the midst of a window it would drop gradients

    for step in range(options.steps):
        loss_id = step % len(TASKS)  # one task per window: gradients that are added up must have one scale
        total = 0.0
        for number in range(ACCUMULATE):
            last = number == ACCUMULATE - 1
            loss = model(torch.randn(BATCH, FEATURES).cuda(), TASKS[loss_id]) / ACCUMULATE
            total += loss.item()
            with amp.scale_loss(loss, optimizer, loss_id=loss_id, delay_unscale=not last) as scaled_loss:
                scaled_loss.backward()
                if last and ranks > 1:
                    # While they are scaled: an overflow on one rank then reaches all, and they skip together.
                    grads = [p.grad for p in model.parameters() if p.grad is not None]
                    flat_dist_call(grads, dist.all_reduce)  # apex divides the sum by the number of ranks
        clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            scale = amp._amp_state.loss_scalers[loss_id].loss_scale()
            print(f"step {step}: {TASKS[loss_id]} {total!r}, scale {scale:g}")
    if rank == 0:
        print(f"{len(optimizer._amp_stash.all_fp16_params)} parameters in half precision")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
