"""A class that owns the loop, clips by the masters, and keeps three dicts in its checkpoints."""

import io
import sys

import torch
from apex import amp


class Trainer:
    def __init__(self, level):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.model, self.optimizer = amp.initialize(
            self.model, self.optimizer, opt_level=level, max_loss_scale=2.**16, verbosity=0
        )

    def training_step(self, x, y):
        self.optimizer.zero_grad()
        prediction = self.model(x)
        loss = torch.nn.functional.mse_loss(prediction, y)
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            # gradients of the scaled loss
            scaled_loss.backward()
        # as in the paper
        torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 0.1)
        self.optimizer.step()
        return loss

    def save(self):
        file = io.BytesIO()
        checkpoint = {
            'model': self.model.state_dict(),
            'optimizer': self.optimizer.state_dict(),
            'amp': amp.state_dict(),
        }
        torch.save(checkpoint, file)
        return file.getvalue()

    def load(self, data):
        checkpoint = torch.load(io.BytesIO(data))
        self.model.load_state_dict(checkpoint['model'])
        self.optimizer.load_state_dict(checkpoint['optimizer'])
        amp.load_state_dict(checkpoint['amp'])  # the loss scale


losses = []
level = sys.argv[sys.argv.index("--opt-level") + 1]
trainer = Trainer(level)
batches = [(torch.randn(4, 8) * (1000 if i == 1 else 1), torch.randn(4, 2)) for i in range(6)]
for x, y in batches[:3]:
    losses.append(trainer.training_step(x, y).detach().clone())
data = trainer.save()
trainer = Trainer(level)
trainer.load(data)
for x, y in batches[3:]:
    losses.append(trainer.training_step(x, y).detach().clone())
