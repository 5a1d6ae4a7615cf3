"""Contrastive learning: LARC around SGD, and batch norms that are synchronised in groups of ranks.

python -m halfpeak run contrastive_larc.py
torchrun --nproc-per-node 2 -m halfpeak run --device cpu contrastive_larc.py --group 2
"""

import argparse
import os

import apex
import torch
import torch.distributed as dist
from apex.parallel.LARC import LARC
from torch import nn
from torch.nn.functional import cross_entropy, normalize

SHARED, NOISE, BATCH, PEAK_LR = 8, 24, 48, 1.0


class Embedding(nn.Module):
    """Maps vectors to the unit sphere."""

    def __init__(self, width=64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SHARED + NOISE, width), nn.BatchNorm1d(width), nn.ReLU())
        self.projector = nn.Linear(width, 16)

    def forward(self, x):
        return normalize(self.projector(self.encoder(x)).float())


def two_views(random):
    """Two views of each sample, one batch below the other: some features are in both, the rest is noise."""
    shared = torch.randn(BATCH, SHARED, generator=random)
    return torch.cat([shared.repeat(2, 1), torch.randn(2 * BATCH, NOISE, generator=random)], 1)


def info_nce(embedded):
    """How well each first view finds its second view in the batch, by cosine similarity (arXiv:1807.03748)."""
    one, other = embedded.chunk(2)
    return cross_entropy(one @ other.t() / 0.1, torch.arange(len(one), device=one.device))


def train(options, rank, ranks):
    torch.manual_seed(5)
    neighbours = apex.parallel.create_syncbn_process_group(options.group)
    model = apex.parallel.convert_syncbn_model(Embedding(), process_group=neighbours).cuda()
    sgd = torch.optim.SGD(model.parameters(), lr=PEAK_LR, momentum=0.9, weight_decay=1e-5)
    optimizer = LARC(sgd, trust_coefficient=0.02, clip=False)
    model, optimizer = apex.amp.initialize(
        model, optimizer, opt_level=options.opt_level, enabled=not options.fp32
    )
    encoder = list(model.encoder.parameters())
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])

    random = torch.Generator().manual_seed(rank)
    for step in range(options.steps):
        for group in optimizer.param_groups:  # those of SGD: warm-up over 10 steps, then down to 0
            group["lr"] = PEAK_LR * min((step + 1) / 10, 1 - step / options.steps)
        loss = info_nce(model(two_views(random).cuda()))
        optimizer.zero_grad()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if step < options.frozen:
            for parameter in encoder:
                parameter.grad = None
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item()!r}, lr {optimizer.optim.param_groups[0]['lr']:.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--fp32", action="store_true", help="without amp")
    parser.add_argument("--group", type=int, default=0, help="ranks that share statistics; 0 for all")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--frozen", type=int, default=5, help="steps in which the projector trains alone")
    options = parser.parse_args()

    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if ranks > 1:
        dist.init_process_group("nccl")
    train(options, rank, ranks)  # its model, which uses the process group, ends before the group does
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
