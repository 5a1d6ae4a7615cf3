import torch
import torch.nn.functional as F
from apex import amp

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
losses = []
for step in range(12):
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    pred = model(x)
    loss = F.mse_loss(pred, y) * (3000 if step < 3 else 1)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=1.0)
    optimizer.step()
    losses.append(loss.detach().clone())
