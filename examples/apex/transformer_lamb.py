"""A transformer with FusedLAMB and FusedLayerNorm: accumulation, clipping, and a function registered for float16.

python -m halfpeak run transformer_lamb.py --opt-level O2
python -m halfpeak run --device cpu transformer_lamb.py --opt-level O2 --optimizer adam
"""

import argparse

import torch
from apex import amp
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedAdam, FusedLAMB
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

LETTERS, LENGTH, BATCH, ACCUMULATE = 12, 16, 16, 3


class Layer(nn.Module):
    """Self-attention and a two-layer perceptron, each on normalised input and added to its input."""

    def __init__(self, width, heads):
        super().__init__()
        self.split = (3, heads, width // heads)
        self.norm_attention, self.norm_perceptron = FusedLayerNorm(width), FusedLayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, stream):
        projected = self.project(self.norm_attention(stream)).unflatten(-1, self.split)
        queries, keys, values = projected.unbind(2)  # each [batch, length, heads, width / heads]
        scores = torch.einsum("bqhw,bkhw->bhqk", queries, keys) * self.split[-1] ** -0.5
        mixed = torch.einsum("bhqk,bkhw->bqhw", scores.softmax(-1), values)
        stream = stream + self.merge(mixed.flatten(2))
        return stream + self.perceptron(self.norm_perceptron(stream))


class Classifier(nn.Module):
    """Reads a text of letters and returns two logits."""

    def __init__(self, width=32, heads=4, layers=2):
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, 2)

    def forward(self, text):
        return self.head(self.layers(self.letters(text) + self.places.weight).mean(1))


def draw(count):
    """Random texts, labelled by whether they have more of letter 1 than of letter 0."""
    text = torch.randint(LETTERS, (count, LENGTH))
    label = (text == 1).sum(1) > (text == 0).sum(1)
    return text.cuda(), label.long().cuda()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--optimizer", choices=["lamb", "adam"], default="lamb")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    torch.manual_seed(8)
    model = Classifier().cuda()
    # Weight decay is for matrices: biases, and weights of layer norms, are vectors.
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = FusedLAMB(groups, lr=1e-2) if options.optimizer == "lamb" else FusedAdam(groups, lr=2e-3)
    # At O1 amp casts the functions that it knows. This makes einsum one of them; it must come before initialize.
    amp.register_half_function(torch, "einsum")
    model, optimizer = amp.initialize(model, optimizer, opt_level=options.opt_level)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))

    for step in range(options.steps):
        total = 0.0
        for _ in range(ACCUMULATE):
            text, label = draw(BATCH)
            loss = cross_entropy(model(text), label) / ACCUMULATE
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            total += loss.item()
        norm = clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        scale = amp._amp_state.loss_scalers[0].loss_scale()
        print(f"step {step}: loss {total!r}, gradient norm {norm.item():.4f}, scale {scale:g}")


if __name__ == "__main__":
    main()
