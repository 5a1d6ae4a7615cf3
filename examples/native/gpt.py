"""A small byte-level GPT, trained on the source text of Python's standard library, and a sample of its output.

python examples/native/gpt.py --steps 300
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halfpeak
from halfpeak.fused import FusedAdamW


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        stream = self.bytes(text) + self.places(torch.arange(length, device=text.device))
        # The level chooses the dtype of the weights. The mask has the same, because attention adds it to its scores.
        mask = nn.Transformer.generate_square_subsequent_mask(length, text.device, stream.dtype)
        return self.head(self.norm(self.blocks(stream, mask, is_causal=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--level", default="auto", help="O0 to O5, or auto for the one that suits the device")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    options = parser.parse_args()

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\0".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    torch.manual_seed(0)
    model = GPT(options.width, options.layers, options.context).to(device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    engine = halfpeak.prepare(model, optimizer, options.level, clip=1.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, options.steps // 10))

    for step in range(options.steps):
        starts = torch.randint(len(text) - options.context - 1, (options.batch, 1))
        rows = text[starts + torch.arange(options.context + 1)].long().to(device)
        with engine.forward():
            loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        engine.backward(loss)
        if engine.step().stepped():
            warmup.step()
        if step % max(1, options.steps // 10) == 0 or step + 1 == options.steps:
            print(f"step {step + 1}: {loss.item():.3f} nats a byte, loss scale {engine.read_scale():g}")

    model.eval()
    written = torch.tensor([list(b"def ")], device=device)
    with torch.no_grad(), engine.forward():
        for _ in range(60):
            logits = model(written[:, -options.context :])[:, -1]
            written = torch.cat([written, torch.multinomial(logits.float().softmax(1), 1)], 1)
    print(bytes(written[0].tolist()).decode("ascii", errors="replace"))


if __name__ == "__main__":
    main()
