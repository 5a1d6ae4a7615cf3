"""Accumulation that leaves gradients scaled, as for reducing them over ranks once."""

import sys

import torch
from apex import amp

torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, num_losses=2, enabled=True, opt_level=sys.argv[2], verbosity=0)
losses = []
for step in range(8):
    task = step // 2 % 2
    loss = model(torch.randn(4, 6)).square().mean() / 2
    delay_unscale = (step + 1) % 2 != 0
    with amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale, loss_id=task) as scaled_loss:
        scaled_loss.backward()
    losses.append(loss.detach())
    if (step + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
