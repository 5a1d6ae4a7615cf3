"""An image classifier at any opt level, on one GPU or on several.

python -m halfpeak run classifier.py --opt-level O2
python -m halfpeak run --device cpu classifier.py --opt-level O2 --loss-scale 128.0
torchrun --nproc-per-node 2 -m halfpeak run --device cpu classifier.py --sync-bn
"""

import argparse
import math
import os
import time

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel import DistributedDataParallel, convert_syncbn_model
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, SIDE = 4, 20


def stripes(count=240):
    """Noisy grey images of stripes, one byte per pixel; the class is the direction of the stripes."""
    random = torch.Generator().manual_seed(7)
    labels = torch.arange(count) % CLASSES
    angles = labels.view(-1, 1, 1) * math.pi / CLASSES
    phases = 2 * math.pi * torch.rand(count, 1, 1, generator=random)
    pixels = torch.arange(SIDE, dtype=torch.float32)
    waves = torch.sin(pixels * angles.cos() + pixels[:, None] * angles.sin() + phases)
    grey = 128 + 60 * waves + 25 * torch.randn(waves.shape, generator=random)
    return TensorDataset(grey.clamp(0, 255).byte()[:, None], labels)


def convolution(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


def build():
    layers = convolution(1, 12), convolution(12, 24), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(24, CLASSES))


def prefetched(loader):
    """Yield the batches on the GPU; while the caller computes on one, a second stream copies the next."""
    copies, ready = torch.cuda.Stream(), None
    for pixels, labels in loader:
        with torch.cuda.stream(copies):
            coming = pixels.cuda(non_blocking=True).float() / 128 - 1, labels.cuda(non_blocking=True)
        if ready is not None:
            yield ready
        torch.cuda.current_stream().wait_stream(copies)
        for tensor in coming:
            tensor.record_stream(torch.cuda.current_stream())  # its memory must outlive what is queued there
        ready = coming
    yield ready


def train(options, rank, ranks):
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)

    model = build()
    if options.sync_bn:
        model = convert_syncbn_model(model)
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=options.opt_level,
        keep_batchnorm_fp32=options.keep_batchnorm_fp32,
        loss_scale=options.loss_scale,
    )
    if ranks > 1:
        model = DistributedDataParallel(model, delay_allreduce=True)

    images = stripes()
    sampler = DistributedSampler(images) if ranks > 1 else None
    loader = DataLoader(images, options.batch, shuffle=sampler is None, sampler=sampler)
    for epoch in range(options.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        start, total = time.perf_counter(), torch.zeros((), device="cuda")
        for pixels, labels in prefetched(loader):
            loss = nn.functional.cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            total += loss.detach()
        if ranks > 1:
            dist.all_reduce(total)
        torch.cuda.synchronize()
        if rank == 0:
            speed = len(images) / (time.perf_counter() - start)
            print(f"epoch {epoch}: loss {total.item() / (ranks * len(loader))!r}, {speed:.0f} images/s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=20, help="images per rank")
    parser.add_argument("--opt-level", default="O1")
    # amp takes these two as text, too: "True" or "False", and a number or "dynamic".
    parser.add_argument("--keep-batchnorm-fp32")
    parser.add_argument("--loss-scale")
    parser.add_argument("--sync-bn", action="store_true", help="batch norms use the statistics of all ranks")
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
