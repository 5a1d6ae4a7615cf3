import sys

import apex
import torch
import torch.nn as nn
from apex.parallel.LARC import LARC
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.normalization.fused_layer_norm import FusedLayerNorm as Norm

torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(8, 16),
    nn.Softplus(),
    FusedLayerNorm(16),
    Norm([16], eps=1e-6),
    FusedRMSNorm(
        16,
        elementwise_affine=True,
    ),
    nn.Linear(16, 4),
)
net = apex.parallel.convert_syncbn_model(net, process_group=None)
# layers of any size learn at one pace
larc = LARC(torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.8), trust_coefficient=0.01, clip=False)
net, larc = apex.amp.initialize(net, larc, opt_level=sys.argv[2], verbosity=0)
losses = []
for _ in range(5):
    x = torch.randn(6, 8)
    loss = nn.functional.smooth_l1_loss(net(x), x[:, :4])
    larc.zero_grad()
    with apex.amp.scale_loss(loss, larc) as scaled:  # half precision needs it
        scaled.backward()
    net[0].bias.grad = None
    larc.step()
    losses.append(loss.detach().clone())
