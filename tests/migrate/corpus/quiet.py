import sys

import torch
from apex import amp  # mixed precision

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model, optimizer = amp.initialize(model, optimizer, opt_level=sys.argv[2], verbosity=0)


class Loop:
    """The loop reaches what the file defines at its top."""

    def run(self):
        for step in range(4):
            optimizer.zero_grad()
            y = model(torch.randn(16, 8))
            with amp.disable_casts():
                # a product that must not be rounded
                gram = y.float() @ y.float().t()
            loss = gram.square().mean()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())


losses = []
Loop().run()
