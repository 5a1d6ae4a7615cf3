"""A run that goes on where it was stopped: checkpoints with amp's state, and accumulation over two batches.

python -m halfpeak run --device cpu resume.py --folder runs/a --opt-level O2 --epochs 3
python -m halfpeak run --device cpu resume.py --folder runs/a --opt-level O2 --epochs 6   # epochs 3 to 5
"""

import argparse
from pathlib import Path

import torch
from apex import amp
from torch import nn
from torch.nn.utils import clip_grad_norm_

ACCUMULATE = 2


def build():
    return nn.Sequential(nn.Linear(10, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 5))


def batches(epoch):
    """Points around five centres. They depend on nothing but the epoch, so a resumed run sees the same ones."""
    centres = 2 * torch.eye(5, 10)
    random = torch.Generator().manual_seed(100 + epoch)
    for _ in range(12):
        labels = torch.randint(5, (32,), generator=random)
        points = centres[labels] + torch.randn(32, 10, generator=random)
        yield points.cuda(), labels.cuda()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(3)
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    stateful = {"model": model, "optimizer": optimizer, "schedule": schedule, "amp": amp}

    first, file = 0, options.folder / "checkpoint.pt"
    if file.exists():
        saved = torch.load(file, map_location="cuda")
        for name, owner in stateful.items():
            owner.load_state_dict(saved[name])
        first = saved["epochs"]
        print(f"goes on after {first} epochs")

    for epoch in range(first, options.epochs):
        for number, (points, labels) in enumerate(batches(epoch), start=1):
            loss = nn.functional.cross_entropy(model(points), labels)
            with amp.scale_loss(loss / ACCUMULATE, optimizer) as scaled_loss:
                scaled_loss.backward()
            if number % ACCUMULATE == 0:
                norm = clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                print(f"epoch {epoch}, batch {number}: loss {loss.item()!r}, gradient norm {norm.item()!r}")
        schedule.step()
        options.folder.mkdir(parents=True, exist_ok=True)
        state = {name: owner.state_dict() for name, owner in stateful.items()}
        torch.save({**state, "epochs": epoch + 1}, file)


if __name__ == "__main__":
    main()
