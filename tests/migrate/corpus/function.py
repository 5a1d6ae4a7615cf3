from apex.amp import initialize, scale_loss
from apex.amp import master_params as masters  # for the norm
import torch
import sys

torch.manual_seed(0)
net = torch.nn.Linear(6, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
amp_net, amp_opt = initialize(net, opt, opt_level=sys.argv[2], verbosity=0)
losses = []
for _ in range(3):
    amp_opt.zero_grad()
    hidden = amp_net(torch.randn(5, 6))
    if hidden.numel() > 3:
        hidden = torch.softmax(hidden @ hidden.t(), 1)
    loss = hidden.square().mean()
    with scale_loss(loss, amp_opt) as scaled: scaled.backward()
    print(sum(p.grad.norm() for p in masters(amp_opt)))
    amp_opt.step()
    losses.append(loss.detach())
