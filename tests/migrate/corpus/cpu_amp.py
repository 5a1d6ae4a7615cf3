import torch
import torch.cpu.amp
from torch.cpu.amp import autocast as cast

torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.cpu.amp.GradScaler(init_scale=2.**8)
losses = []
for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
    optimizer.zero_grad()
    with cast(True, dtype), torch.cpu.amp.autocast(cache_enabled=False, dtype=dtype):
        loss = model(torch.randn(4, 6)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.detach().float())


@torch.cpu.amp.autocast()
def evaluate(x):
    return model(x)


losses.append(evaluate(torch.randn(2, 6)).detach().float().sum())
