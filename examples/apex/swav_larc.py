"""Self-supervised learning in the manner of SwAV: LARC around SGD, synchronised batch norms, swapped assignments.

Two noisy views of each vector should get the same prototypes. Run it with:

    python -m halfpeak run [--device cpu] swav_larc.py --use_fp16
"""

import argparse
import math
import os

import apex
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from apex.parallel.LARC import LARC

parser = argparse.ArgumentParser(description="Implementation of SwAV")
parser.add_argument("--temperature", default=0.2, type=float)
parser.add_argument("--epsilon", default=0.1, type=float)
parser.add_argument("--sinkhorn_iterations", default=3, type=int)
parser.add_argument("--feat_dim", default=16, type=int)
parser.add_argument("--nmb_prototypes", default=12, type=int)
parser.add_argument("--epochs", default=5, type=int)
parser.add_argument("--batch_size", default=32, type=int)
parser.add_argument("--base_lr", default=0.8, type=float)
parser.add_argument("--final_lr", default=0.01, type=float)
parser.add_argument("--wd", default=1e-6, type=float)
parser.add_argument("--freeze_prototypes_niters", default=4, type=int)
parser.add_argument("--sync_bn", type=str, default="pytorch", choices=["pytorch", "apex"])
parser.add_argument("--syncbn_process_group_size", type=int, default=0)
parser.add_argument("--use_fp16", action="store_true")
parser.add_argument("--seed", type=int, default=31)


class MultiPrototypes(nn.Module):
    def __init__(self, feat_dim, prototypes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(inplace=True))
        self.projection_head = nn.Sequential(
            nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(inplace=True), nn.Linear(48, feat_dim)
        )
        self.prototypes = nn.Linear(feat_dim, prototypes, bias=False)

    def forward(self, inputs):
        x = self.projection_head(self.backbone(torch.cat(inputs)))
        x = F.normalize(x, dim=1, p=2)
        return x, self.prototypes(x)


def views(args, generator):
    """Two noisy views of vectors that lie around eight centres."""
    centres = torch.randn(8, 24, generator=torch.Generator().manual_seed(5))
    clean = centres[torch.randint(0, 8, (args.batch_size,), generator=generator)]
    return [clean + 0.3 * torch.randn(clean.shape, generator=generator) for _ in range(2)]


@torch.no_grad()
def distributed_sinkhorn(out, args):
    Q = torch.exp(out / args.epsilon).t()
    B = Q.shape[1] * args.world_size
    K = Q.shape[0]
    sum_Q = torch.sum(Q)
    reduce(sum_Q, args)
    Q /= sum_Q
    for _ in range(args.sinkhorn_iterations):
        sum_of_rows = torch.sum(Q, dim=1, keepdim=True)
        reduce(sum_of_rows, args)
        Q /= sum_of_rows
        Q /= K
        Q /= torch.sum(Q, dim=0, keepdim=True)
        Q /= B
    Q *= B
    return Q.t()


def reduce(tensor, args):
    if args.world_size > 1:
        dist.all_reduce(tensor)


def main():
    args = parser.parse_args()
    args.rank = int(os.environ.get("RANK", 0))
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.gpu_to_work_on = args.rank % torch.cuda.device_count()
    if args.world_size > 1:
        dist.init_process_group(backend="nccl", init_method="env://")
    torch.cuda.set_device(args.gpu_to_work_on)
    torch.manual_seed(args.seed)
    torch.cuda.manual_seed_all(args.seed)

    model = MultiPrototypes(args.feat_dim, args.nmb_prototypes)
    if args.sync_bn == "apex":
        process_group = apex.parallel.create_syncbn_process_group(args.syncbn_process_group_size)
        model = apex.parallel.convert_syncbn_model(model, process_group=process_group)
    model = model.cuda()

    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=args.wd)
    optimizer = LARC(optimizer=optimizer, trust_coefficient=0.05, clip=False)
    niters = 12
    lr_schedule = [
        args.final_lr
        + 0.5 * (args.base_lr - args.final_lr) * (1 + math.cos(math.pi * t / (args.epochs * niters)))
        for t in range(args.epochs * niters)
    ]
    if args.use_fp16:
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level="O1")
    if args.world_size > 1:
        model = nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu_to_work_on])

    generator = torch.Generator().manual_seed(args.rank)
    for epoch in range(args.epochs):
        average = 0.0
        for it in range(niters):
            iteration = epoch * niters + it
            for param_group in optimizer.param_groups:
                param_group["lr"] = lr_schedule[iteration]
            with torch.no_grad():
                prototypes = model.module.prototypes if args.world_size > 1 else model.prototypes
                w = nn.functional.normalize(prototypes.weight.data.clone(), dim=1, p=2)
                prototypes.weight.copy_(w)

            inputs = [view.cuda(non_blocking=True) for view in views(args, generator)]
            _, output = model(inputs)
            bs = args.batch_size
            loss = 0
            for crop in range(2):
                with torch.no_grad():
                    q = distributed_sinkhorn(output[bs * crop : bs * (crop + 1)].detach().float(), args)
                x = output[bs * (1 - crop) : bs * (2 - crop)] / args.temperature
                loss -= torch.mean(torch.sum(q * F.log_softmax(x, dim=1), dim=1))
            loss /= 2

            optimizer.zero_grad()
            if args.use_fp16:
                with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            if iteration < args.freeze_prototypes_niters:
                for name, p in model.named_parameters():
                    if "prototypes" in name:
                        p.grad = None
            optimizer.step()
            average += loss.item() / niters
        if args.rank == 0:
            print(f"Epoch: [{epoch}]  Loss {average!r}  Lr: {optimizer.optim.param_groups[0]['lr']:.4f}")
    if args.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
