from contextlib import suppress

import torch
from torch.cuda import amp
from torch.cuda.amp import (
    GradScaler,  # the scale
    autocast,
    custom_bwd,
    custom_fwd,
)


class Square(torch.autograd.Function):
    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @custom_bwd
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def train(model, optimizer, scaler: GradScaler, enabled=True):
    losses = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        with autocast(enabled):  # mixed precision
            out = model(torch.randn(4, 6))
            with torch.cuda.amp.autocast(enabled=False):
                loss = Square.apply(out.float()).mean()
        with amp.autocast(dtype=torch.bfloat16) if enabled else suppress():
            loss = loss + model(torch.randn(4, 6)).mean().float()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach().clone())
    return losses


torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
losses = train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.cuda.amp.GradScaler(2.**10, enabled=True))
