"""OptimWrapperDict: a small GAN on digits, with two wrappers of different classes from one configuration dict.

python optim_wrapper_dict.py --steps 200
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from digits import loaders
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from halfpeak.optim import OPTIM_WRAPPER_CONSTRUCTORS, OptimWrapperDict, build_optim_wrapper

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=64)
args = parser.parse_args()

NOISE = 16
ADAM = {"type": "Adam", "lr": 1e-3, "betas": (0.5, 0.999)}
CONFIG: dict[str, Any] = {
    "constructor": "GANConstructor",
    "generator": {"type": "ApexOptimWrapper", "opt_level": "O5", "optimizer": ADAM},
    "discriminator": {"type": "AmpOptimWrapper", "dtype": "float16", "optimizer": ADAM},
}


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class GANConstructor:
    """Builds a wrapper for each submodule that the configuration names."""

    def __init__(
        self, optim_wrapper_cfg: Mapping[str, Any], paramwise_cfg: Mapping[str, Any] | None = None
    ) -> None:
        self.config = optim_wrapper_cfg

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        parts = {
            name: build_optim_wrapper(model.get_submodule(name), self.config[name]) for name in self.config
        }
        return OptimWrapperDict(**parts)


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


def adversarial(logits: Tensor, real: bool) -> Tensor:
    return binary_cross_entropy_with_logits(
        logits.float(), torch.full_like(logits, real, dtype=torch.float32)
    )


device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)
training, _ = loaders(args.batch, device)
gan = GAN().to(device)
wrappers = build_optim_wrapper(gan, CONFIG)

step = 0
while step < args.steps:
    for images, _ in training:
        with wrappers["generator"].optim_context(gan.generator):
            fake = gan.generator(torch.randn(len(images), NOISE, device=device))
        with wrappers["discriminator"].optim_context(gan.discriminator):
            on_real = adversarial(gan.discriminator(images.flatten(1)), real=True)
            on_fake = adversarial(gan.discriminator(fake.detach()), real=False)
        wrappers["discriminator"].update_params(on_real + on_fake)

        with wrappers["discriminator"].optim_context(gan.discriminator):
            fooled = adversarial(gan.discriminator(fake), real=True)
        wrappers["generator"].update_params(fooled)
        wrappers["discriminator"].zero_grad()  # the generator's loss also left gradients in the discriminator

        step += 1
        if step % 20 == 0:
            print(
                f"step {step}: discriminator {(on_real + on_fake).item():.4f}, generator {fooled.item():.4f}"
            )
        if step == args.steps:
            break
print(f"learning rates {wrappers.get_lr()}")
print(f"loss scale of the discriminator {wrappers['discriminator'].loss_scaler.get_scale():g}")
