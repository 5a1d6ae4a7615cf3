import sys

import apex
import torch
import torch.nn as nn
from apex.parallel.LARC import LARC
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 16),
    FusedLayerNorm(16),
    BertLayerNorm([16], eps=1e-12),
    FusedRMSNorm(
        16,
        elementwise_affine=True,
    ),
    nn.Linear(16, 4),
)
process_group = None
model = apex.parallel.convert_syncbn_model(model, process_group=process_group)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-6)
optimizer = LARC(optimizer=optimizer, trust_coefficient=0.001, clip=False)
# init mixed precision
model, optimizer = apex.amp.initialize(model, optimizer, opt_level=sys.argv[2], verbosity=0)
losses = []
for it in range(5):
    inputs = torch.randn(6, 8)
    embedding = model(inputs)
    # a loss outside of the model
    loss = -(torch.softmax(embedding / 0.1, 1) * torch.log_softmax(embedding, 1)).sum(1).mean()
    # ============ backward and optim step ... ============
    optimizer.zero_grad()
    with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    # cancel some gradients
    if it < 2:
        for name, p in model.named_parameters():
            if "4." in name:
                p.grad = None
    optimizer.step()
    losses.append(loss.detach().clone())
