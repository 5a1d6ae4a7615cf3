"""Train in the manner of Swin Transformer's main.py: checkpoints with amp's state, automatic resume, accumulation.

python -m halfpeak run [--device cpu] swin_resume.py --output runs/swin --amp-opt-level O2
python -m halfpeak run [--device cpu] swin_resume.py --output runs/swin --amp-opt-level O2 --epochs 6   # resumes
"""

import argparse
import math
import os

import torch
import torch.nn as nn

try:
    # noinspection PyUnresolvedReferences
    from apex import amp
except ImportError:
    amp = None


def parse_option():
    parser = argparse.ArgumentParser("Swin-style training and evaluation script")
    parser.add_argument("--output", default="output")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--total-epochs", type=int, default=6, help="over which the learning rate falls")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulation-steps", type=int, default=2)
    parser.add_argument("--clip-grad", type=float, default=5.0)
    parser.add_argument("--base-lr", type=float, default=5e-3)
    parser.add_argument("--amp-opt-level", default="O1", choices=["O0", "O1", "O2"])
    args = parser.parse_args()
    if args.amp_opt_level != "O0":
        assert amp is not None, "amp not installed!"
    return args


class WindowBlock(nn.Module):
    """Attention inside windows of four tokens, then an MLP."""

    def __init__(self, dim, window=4):
        super().__init__()
        self.window = window
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.bias = nn.Parameter(torch.zeros(window, window))
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        batch, length, dim = x.shape
        windows = self.norm1(x).view(batch * length // self.window, self.window, dim)
        q, k, v = self.qkv(windows).chunk(3, dim=-1)
        attention = (q * dim**-0.5) @ k.transpose(-2, -1) + self.bias
        attention = attention.softmax(dim=-1)
        x = x + self.proj(attention @ v).view(batch, length, dim)
        return x + self.mlp(self.norm2(x))


def build_model(dim=16, classes=4):
    return nn.Sequential(
        nn.Linear(8, dim),
        WindowBlock(dim),
        WindowBlock(dim),
        nn.LayerNorm(dim),
        nn.Flatten(),
        nn.Linear(16 * dim, classes),
    )


def batches(epoch, batch_size, count=8):
    """Image patches of four classes; the batches depend only on the epoch, so a resumed run gets the same ones."""
    kinds = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(11))
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(count):
        targets = torch.randint(0, 4, (batch_size,), generator=generator)
        yield kinds[targets] + torch.randn(batch_size, 16, 8, generator=generator), targets


def get_grad_norm(parameters, norm_type=2):
    parameters = list(filter(lambda p: p.grad is not None, parameters))
    total_norm = 0
    for p in parameters:
        total_norm += p.grad.data.norm(norm_type).item() ** norm_type
    return total_norm ** (1.0 / norm_type)


def save_checkpoint(config, epoch, model, optimizer, lr_scheduler):
    save_state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": lr_scheduler.state_dict(),
        "epoch": epoch,
    }
    if config.amp_opt_level != "O0":
        save_state["amp"] = amp.state_dict()
    save_path = os.path.join(config.output, f"ckpt_epoch_{epoch}.pth")
    torch.save(save_state, save_path)
    print(f"{save_path} saved !!!")


def auto_resume_helper(output_dir):
    checkpoints = [name for name in os.listdir(output_dir) if name.endswith("pth")]
    if not checkpoints:
        return None
    return max(
        (os.path.join(output_dir, name) for name in checkpoints),
        key=lambda path: int(path[:-4].split("_")[-1]),
    )


def load_checkpoint(config, path, model, optimizer, lr_scheduler):
    print(f"==============> Resuming from {path}....................")
    checkpoint = torch.load(path, map_location="cuda")
    msg = model.load_state_dict(checkpoint["model"], strict=False)
    print(msg)
    optimizer.load_state_dict(checkpoint["optimizer"])
    lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
    if "amp" in checkpoint and config.amp_opt_level != "O0":
        amp.load_state_dict(checkpoint["amp"])
    return checkpoint["epoch"] + 1


def train_one_epoch(config, model, criterion, optimizer, epoch, lr_scheduler):
    model.train()
    optimizer.zero_grad()
    for idx, (samples, targets) in enumerate(batches(epoch, config.batch_size)):
        samples = samples.cuda(non_blocking=True)
        targets = targets.cuda(non_blocking=True)
        outputs = model(samples)
        loss = criterion(outputs, targets) / config.accumulation_steps
        if config.amp_opt_level != "O0":
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            if config.clip_grad:
                grad_norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), config.clip_grad)
            else:
                grad_norm = get_grad_norm(amp.master_params(optimizer))
        else:
            loss.backward()
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        if (idx + 1) % config.accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
            lr_scheduler.step()
        torch.cuda.synchronize()
        memory_used = torch.cuda.max_memory_allocated() / (1024.0 * 1024.0)
        print(
            f"Train: [{epoch}/{config.epochs}][{idx}]  loss {loss.item() * config.accumulation_steps!r}  "
            f"grad_norm {float(grad_norm):.4f}  mem {memory_used:.0f}MB"
        )


def main():
    config = parse_option()
    os.makedirs(config.output, exist_ok=True)
    torch.manual_seed(0)
    model = build_model()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.base_lr, eps=1e-8, weight_decay=0.05)
    if config.amp_opt_level != "O0":
        model, optimizer = amp.initialize(model, optimizer, opt_level=config.amp_opt_level)
    steps = config.total_epochs * 8 // config.accumulation_steps
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
    )
    criterion = nn.CrossEntropyLoss()
    start_epoch = 0
    resume_file = auto_resume_helper(config.output)
    if resume_file:
        start_epoch = load_checkpoint(config, resume_file, model, optimizer, lr_scheduler)
    for epoch in range(start_epoch, config.epochs):
        train_one_epoch(config, model, criterion, optimizer, epoch, lr_scheduler)
        save_checkpoint(config, epoch, model, optimizer, lr_scheduler)


if __name__ == "__main__":
    main()
