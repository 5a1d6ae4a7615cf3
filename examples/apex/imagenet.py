"""Train an image classifier the way scripts of 2019 did: opt levels on the command line, apex's DDP, a prefetcher.

Synthetic images stand in for ImageNet. The script imports only apex, which ``halfpeak run`` provides:

    python -m halfpeak run imagenet.py --opt-level O2                      # on a GPU
    python -m halfpeak run --device cpu imagenet.py --opt-level O2         # without one
    torchrun --nproc-per-node 2 -m halfpeak run --device cpu imagenet.py --sync_bn
"""

import argparse
import os
import time

import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.optim

try:
    from apex import amp
    from apex.parallel import DistributedDataParallel as DDP
    from apex.parallel import convert_syncbn_model
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")


def parse():
    parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("-b", "--batch-size", default=16, type=int)
    parser.add_argument("--lr", default=0.4, type=float, help="for a batch of 256 images, scaled to yours")
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--weight-decay", default=1e-4, type=float)
    parser.add_argument("--print-freq", default=4, type=int)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--local_rank", default=os.getenv("LOCAL_RANK", 0), type=int)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    parser.add_argument("--channels-last", type=bool, default=False)
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + x)


def build_model(classes=4, width=8):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Block(width),
        Block(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, classes),
    )


class SyntheticImages(torch.utils.data.Dataset):
    """Each class is a pattern of squares under noise, in uint8 as an image decoder returns it."""

    def __init__(self, size=128, classes=4):
        generator = torch.Generator().manual_seed(1)
        patterns = torch.randint(0, 2, (classes, 3, 8, 8), generator=generator).repeat_interleave(2, 2)
        patterns = patterns.repeat_interleave(2, 3)
        self.targets = torch.arange(size) % classes
        noise = torch.randint(0, 128, (size, 3, 16, 16), generator=generator)
        self.images = (patterns[self.targets] * 127 + noise).to(torch.uint8)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


class data_prefetcher:
    """Copies and normalises the next batch on a side stream."""

    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255]).cuda().view(1, 3, 1, 1)
        self.std = torch.tensor([0.229 * 255, 0.224 * 255, 0.225 * 255]).cuda().view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float()
            self.next_input = self.next_input.sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input = self.next_input
        target = self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
        if target is not None:
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


def adjust_learning_rate(optimizer, args, epoch, step, len_epoch):
    """Warm up over the first epoch, then divide by 10 in the last third."""
    lr = args.lr * (0.1 if epoch >= args.epochs - args.epochs // 3 else 1.0)
    if epoch < 1:
        lr = lr * float(1 + step + epoch * len_epoch) / len_epoch
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean() * 100


def reduce_tensor(tensor, world_size):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= world_size
    return rt


def main():
    args = parse()
    cudnn.benchmark = True
    if args.deterministic:
        cudnn.benchmark = False
        cudnn.deterministic = True
    torch.manual_seed(args.local_rank if args.deterministic else 0)
    assert torch.backends.cudnn.enabled, "Amp requires cudnn backend to be enabled."

    args.distributed = False
    if "WORLD_SIZE" in os.environ:
        args.distributed = int(os.environ["WORLD_SIZE"]) > 1
    args.gpu = 0
    args.world_size = 1
    if args.distributed:
        args.gpu = args.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(args.gpu)
        dist.init_process_group(backend="nccl", init_method="env://")
        args.world_size = dist.get_world_size()

    model = build_model()
    if args.sync_bn:
        print("using apex synced BN")
        model = convert_syncbn_model(model)
    model = model.cuda()

    args.lr = args.lr * float(args.batch_size * args.world_size) / 256.0
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        model = DDP(model, delay_allreduce=True)

    criterion = nn.CrossEntropyLoss().cuda()
    dataset = SyntheticImages()
    sampler = None
    if args.distributed:
        sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=args.batch_size, shuffle=(sampler is None), sampler=sampler
    )
    for epoch in range(args.epochs):
        if args.distributed:
            sampler.set_epoch(epoch)
        train(loader, model, criterion, optimizer, epoch, args)
    if args.distributed:
        dist.destroy_process_group()


def train(train_loader, model, criterion, optimizer, epoch, args):
    model.train()
    end = time.time()
    prefetcher = data_prefetcher(train_loader)
    input, target = prefetcher.next()
    i = 0
    while input is not None:
        i += 1
        adjust_learning_rate(optimizer, args, epoch, i, len(train_loader))
        output = model(input)
        loss = criterion(output, target)

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

        if i % args.print_freq == 0:
            prec1 = accuracy(output.data, target)
            reduced_loss = loss.data
            if args.distributed:
                reduced_loss = reduce_tensor(loss.data, args.world_size)
            torch.cuda.synchronize()
            batch_time = (time.time() - end) / args.print_freq
            end = time.time()
            if args.local_rank == 0:
                print(
                    f"Epoch: [{epoch}][{i}/{len(train_loader)}]  Loss {reduced_loss.item()!r}  "
                    f"Prec@1 {prec1.item():.3f}  Speed {args.world_size * args.batch_size / batch_time:.1f} img/s"
                )
        input, target = prefetcher.next()


if __name__ == "__main__":
    main()
