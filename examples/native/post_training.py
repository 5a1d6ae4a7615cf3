"""Post-training in float16: shards at O2 learn from rewards, and a float16 copy of the policy on each rank generates the texts.

torchrun --nproc-per-node 2 examples/native/post_training.py --folder run --steps 100

A text is a series of numbers, and its reward the share of those that are one more than the number before. Every few steps
the copies get the weights. The same command resumes a stopped run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention

import halfpeak
from halfpeak.distributed import fully_shard

NUMBERS = 16
"""The vocabulary."""
LENGTH = 8
"""Tokens of a continuation."""


class Block(nn.Module):
    """A transformer block with one causal head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(self.norm(x)).chunk(3, -1)
        x = x + self.out(scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Policy(nn.Module):
    """Tokens in, logits of the next one out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUMBERS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(2)))
        self.head = nn.Linear(width, NUMBERS)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(text)))


def whole_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The weights by name, gathered one after the other; each rank casts its part before, so no float32 weight is whole."""
    for name, shard in model.state_dict().items():
        cast = shard.to(dtype)
        yield name, cast.full_tensor() if isinstance(cast, DTensor) else cast


def log_probs(model: nn.Module, text: Tensor) -> Tensor:
    """Of each token after the first."""
    logits = model(text[:, :-1]).float()
    return logits.log_softmax(-1).gather(-1, text[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def generate(model: nn.Module, text: Tensor) -> tuple[Tensor, Tensor]:
    """Continue the texts; return them, and the log-probabilities with which each token was drawn."""
    for _ in range(LENGTH):
        chances = model(text)[:, -1].float().softmax(-1)
        text = torch.cat([text, torch.multinomial(chances, 1)], 1)
    return text, log_probs(model, text)


def rewards(text: Tensor) -> Tensor:
    """The share of tokens that are one more than the token before."""
    return ((text[:, :-1] + 1) % NUMBERS == text[:, 1:]).float().mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--level", default="O2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--every", type=int, default=4, help="steps from one transfer of the weights to the next"
    )
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    dist.init_process_group()
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local)
        device = torch.accelerator.current_accelerator() or device

    torch.manual_seed(0)
    low = torch.bfloat16 if options.level == "O5" else torch.float16
    generator = Policy(options.width).to(device, low).eval()
    policy = fully_shard(Policy(options.width).to(device), options.level)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    # Gradients of a policy are small: the scale begins high, and the first skips bring it to where they fit into float16.
    scale = halfpeak.ScaleConfig(init=2.0**24, recovers=True)
    engine = halfpeak.prepare(policy, optimizer, options.level, clip=1.0, scale=scale)

    saved = [path.parent for path in options.folder.glob("*/.metadata")]  # DCP writes it last
    if saved:
        dcp.load({"engine": engine}, checkpoint_id=max(saved, key=lambda path: int(path.name)))
    first, copies = engine.micro_step, generator.state_dict()
    for number in range(first, options.steps):
        if number % options.every == 0 or number == first:
            for name, value in whole_weights(policy, low):
                copies[name].copy_(value)
        torch.manual_seed(1000 * number + rank)  # each rank draws its own texts
        prompts = torch.randint(NUMBERS, (8, 1), device=device).repeat_interleave(16, 0)
        text, drawn = generate(generator, prompts)
        earned = rewards(text)
        of_prompt = earned.view(8, 16)
        advantage = (of_prompt - of_prompt.mean(1, keepdim=True)).view(-1, 1)

        with engine.forward(policy):
            ratio = (log_probs(policy, text) - drawn).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        engine.backward(loss)
        if rank == 0 and number + 1 == options.steps:
            print(engine.memory())
        engine.step()
        if rank == 0 and number % 20 == 0:
            apart = (ratio - 1).abs().mean().item()  # how far generator and policy are from each other
            print(
                f"step {number}: reward {earned.mean().item():.3f}, ratios {apart:.5f} from 1, "
                f"scale {engine.read_scale():g}, {int(engine.num_skipped)} skipped"
            )
    dcp.save({"engine": engine}, checkpoint_id=options.folder / str(engine.micro_step))
    dist.barrier()  # no rank closes the process group while another still uses it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
