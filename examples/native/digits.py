"""Image classification on scikit-learn's digits: opt level, clipping, accumulation, evaluation, bit-for-bit resume.

python examples/native/digits.py --epochs 5
python examples/native/digits.py --epochs 10 --resume
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import halfpeak
from halfpeak import checkpoint

HELD_OUT = 360


def build() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", default="auto", help="O0 to O5, or auto for the one that suits the device")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes to a step")
    parser.add_argument("--file", type=Path, default=Path("output/digits.pt"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    bunch = load_digits()
    images = torch.as_tensor(bunch.images, dtype=torch.float32, device=device)[:, None] / 16
    labels = torch.as_tensor(bunch.target, device=device)

    torch.manual_seed(0)
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    engine = halfpeak.prepare(model, optimizer, options.level, clip=1.0, accumulate=options.accumulate)

    first = 0
    if options.resume:
        saved = checkpoint.load(options.file)
        engine.load_state_dict(saved["engine"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["epoch"]
    for epoch in range(first, options.epochs):
        # The order depends only on the epoch, so a resumed run gets the batches of an uninterrupted one.
        order = (
            torch.randperm(len(images) - HELD_OUT, generator=torch.Generator().manual_seed(epoch)) + HELD_OUT
        )
        for rows in order.split(options.batch):
            with engine.forward():
                loss = cross_entropy(model(images[rows]), labels[rows])
            engine.backward(loss)
            result = engine.step()
            if result.boundary and not result.stepped():
                print(f"skipped a step; not finite: {', '.join(result.nonfinite()[:3])}")
        schedule.step()

        model.eval()
        with torch.no_grad(), engine.forward():
            hits = model(images[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]
        model.train()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, held out {hits.float().mean().item():.4f}")
        options.file.parent.mkdir(parents=True, exist_ok=True)
        state = {"engine": engine.state_dict(), "schedule": schedule.state_dict(), "epoch": epoch + 1}
        checkpoint.save(options.file, state)
    print(engine)


if __name__ == "__main__":
    main()
