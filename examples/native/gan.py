"""A GAN on scikit-learn's digits: one engine, two optimizers, and a loss scale for each loss.

python examples/native/gan.py --steps 500
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as score

import halfpeak

NOISE = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", default="auto", help="O0 to O5, or auto for the one that suits the device")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    real = torch.as_tensor(load_digits().data, dtype=torch.float32, device=device) / 8 - 1

    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh()).to(device)
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(device)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    engine = halfpeak.prepare(
        [generator, discriminator], [of_generator, of_discriminator], options.level, num_losses=2
    )

    yes = torch.ones(options.batch, 1, device=device)
    for step in range(options.steps):
        batch = real[torch.randint(len(real), (options.batch,))]
        with engine.forward():
            fake = generator(torch.randn(options.batch, NOISE, device=device))
            loss_d = score(discriminator(batch), yes) + score(discriminator(fake.detach()), 0 * yes)
        engine.backward(loss_d, loss_id=0, optimizers=of_discriminator)
        engine.step(optimizers=of_discriminator)

        # This loss leaves no gradients in the discriminator, because backward names only the generator's optimizer.
        with engine.forward():
            loss_g = score(discriminator(fake), yes)
        engine.backward(loss_g, loss_id=1, optimizers=of_generator)
        engine.step(optimizers=of_generator)
        if step % max(1, options.steps // 5) == 0 or step + 1 == options.steps:
            print(f"step {step + 1}: discriminator {loss_d.item():.3f}, generator {loss_g.item():.3f}")
    print(engine)


if __name__ == "__main__":
    main()
