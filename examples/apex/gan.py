"""A GAN: two models, two optimizers, and three losses that each have their own loss scale.

python -m halfpeak run gan.py --opt-level O1
python -m halfpeak run --device cpu gan.py --opt-level O2
"""

import argparse
import math

import torch
from apex import amp
from torch import nn
from torch.nn.functional import softplus

NOISE, LENGTH = 6, 32


def build():
    """The generator, which makes a curve from noise, and the critic, whose output is high for a real curve."""
    generator = nn.Sequential(
        nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, LENGTH), nn.Tanh()
    )
    critic = nn.Sequential(nn.Linear(LENGTH, 64), nn.LeakyReLU(0.1), nn.Linear(64, 1))
    return generator, critic


def real_curves(count):
    """One period of a sine each, from a random phase on."""
    phases = 2 * math.pi * torch.rand(count, 1)
    return torch.sin(phases + torch.linspace(0, 2 * math.pi, LENGTH))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=24)
    options = parser.parse_args()

    torch.manual_seed(12)
    generator, critic = (model.cuda() for model in build())
    generator_adam = torch.optim.Adam(generator.parameters(), lr=3e-3, betas=(0.5, 0.99))
    critic_adam = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.99))
    (generator, critic), (generator_adam, critic_adam) = amp.initialize(
        [generator, critic], [generator_adam, critic_adam], opt_level=options.opt_level, num_losses=3
    )

    def backward(loss, optimizer, loss_id):
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
            scaled_loss.backward()

    for step in range(options.steps):
        fake = generator(torch.randn(options.batch, NOISE).cuda())

        critic_adam.zero_grad()  # also drops what the generator's loss left in the critic
        on_real = softplus(-critic(real_curves(options.batch).cuda())).mean()
        backward(on_real, critic_adam, loss_id=0)
        on_fake = softplus(critic(fake.detach())).mean()
        backward(on_fake, critic_adam, loss_id=1)
        critic_adam.step()

        generator_adam.zero_grad()
        fooled = softplus(-critic(fake)).mean()
        backward(fooled, generator_adam, loss_id=2)
        generator_adam.step()

        print(f"step {step}: critic {(on_real + on_fake).item()!r}, generator {fooled.item()!r}")
    print(amp.state_dict())


if __name__ == "__main__":
    main()
