"""More of amp than a loop needs: registered functions, casts switched off, a look at the scale."""

import sys

import torch
from apex import amp
from apex.fp16_utils import FP16Model
from apex.multi_tensor_apply import multi_tensor_applier
import amp_C

amp.register_half_function(torch, "einsum")
torch.manual_seed(0)
model = torch.nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level=sys.argv[2], verbosity=0)


@amp.float_function
def norm(x):
    return x.norm()


losses = []
for _ in range(3):
    optimizer.zero_grad()
    y = torch.einsum("bi,bj->bij", model(torch.randn(3, 6)), torch.randn(3, 6))
    with amp.disable_casts():
        loss = norm(y.float())
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    losses += [loss.detach(), torch.tensor(amp._amp_state.loss_scalers[0].loss_scale())]
overflow = torch.zeros(1, dtype=torch.int32)
losses.append(multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [[p.data for p in model.parameters()]], False)[0])
