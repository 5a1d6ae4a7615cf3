"""An image classifier in the manner of the ImageNet example: the loop is a function beside main."""

import argparse

import torch
import torch.nn as nn

try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex import amp
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", type=str, default="O1")
parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
parser.add_argument("--loss-scale", type=str, default=None)
losses = []


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    # Initialize Amp.  Amp accepts either values or strings for the optional override arguments,
    # for convenient interoperation with argparse.
    model, optimizer = amp.initialize(model, optimizer,
                                      opt_level=args.opt_level,
                                      keep_batchnorm_fp32=args.keep_batchnorm_fp32,
                                      loss_scale=args.loss_scale,
                                      verbosity=0
                                      )
    criterion = nn.CrossEntropyLoss()
    loader = [(torch.randn(16, 3, 8, 8), torch.randint(10, (16,))) for _ in range(6)]
    for epoch in range(2):
        train(loader, model, criterion, optimizer, epoch)


def train(train_loader, model, criterion, optimizer, epoch):
    model.train()
    for i, (input, target) in enumerate(train_loader):
        # adjust_learning_rate(optimizer, epoch, i)

        # compute output
        output = model(input)
        loss = criterion(output * 40, target)

        # compute gradient and do SGD step
        optimizer.zero_grad()

        with amp.scale_loss(loss, optimizer) as scaled_loss:  # the scale is dynamic
            scaled_loss.backward()
        optimizer.step()

        losses.append(loss.detach().clone())
        if i % 3 == 0:
            prec1 = (output.argmax(1) == target).float().mean()
            print("Epoch: [{0}][{1}]\tLoss {2}\tPrec@1 {3}".format(epoch, i, loss.item(), prec1.item()))


if __name__ == "__main__":
    main()
