"""Multi-task pre-training in the manner of UNITER: one loss scaler per task, delay_unscale during accumulation.

Gradients are reduced over the ranks by hand, once per step, while they are still scaled. Run it with:

    python -m halfpeak run [--device cpu] uniter_pretrain.py --opt_level O2
"""

import argparse
import os
import random

import torch
import torch.distributed as dist
from apex import amp
from apex.parallel.distributed import flat_dist_call
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

TASKS = ["mlm", "mrfr", "itm"]


class UniterForPretraining(nn.Module):
    """One encoder for words and regions, and a head for each task."""

    def __init__(self, vocabulary=32, regions=12, hidden=32):
        super().__init__()
        self.word = nn.Embedding(vocabulary, hidden)
        self.region = nn.Linear(regions, hidden)
        layer = nn.TransformerEncoderLayer(hidden, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mlm = nn.Linear(hidden, vocabulary)
        self.mrfr = nn.Linear(hidden, regions)
        self.itm = nn.Linear(hidden, 2)

    def forward(self, batch, task):
        words = self.word(batch["ids"])
        x = self.encoder(torch.cat([words, self.region(batch["regions"].to(words.dtype))], dim=1))
        if task == "mlm":
            return F.cross_entropy(self.mlm(x[:, 0]).float(), batch["masked"], reduction="none")
        if task == "mrfr":
            return F.mse_loss(self.mrfr(x[:, -1]).float(), batch["target"].float(), reduction="none")
        return F.cross_entropy(self.itm(x.mean(1)).float(), batch["match"], reduction="none")


def make_batch(size=16, vocabulary=32, regions=12):
    ids = torch.randint(1, vocabulary, (size, 6))
    masked = ids[:, 2].clone()  # the word to predict, at place 0, equals the third one
    match = torch.randint(0, 2, (size,))
    features = torch.randn(size, 3, regions) * 0.1 + match[:, None, None]
    target = features[:, 0].clone()
    ids[:, 0] = 0
    return {"ids": ids, "regions": features, "masked": masked, "target": target, "match": match}


def all_reduce_and_rescale_tensors(tensors, rescale_denom):
    if dist.is_initialized():
        flat_dist_call(tensors, dist.all_reduce)
    for tensor in tensors:
        tensor.div_(rescale_denom)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt_level", default="O2")
    parser.add_argument("--num_train_steps", type=int, default=24)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--grad_norm", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=42)
    opts = parser.parse_args()

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    if world > 1:
        dist.init_process_group("nccl")
    device = torch.device("cuda", torch.cuda.current_device())
    random.seed(opts.seed)
    torch.manual_seed(opts.seed)

    model = UniterForPretraining().to(device)
    if world > 1:
        flat_dist_call([p.data for p in model.parameters()], dist.broadcast, (0,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=opts.learning_rate, betas=(0.9, 0.98))
    task2scaler = {t: i for i, t in enumerate(TASKS)}
    model, optimizer = amp.initialize(
        model, optimizer, num_losses=len(task2scaler), enabled=True, opt_level=opts.opt_level
    )
    assert hasattr(optimizer, "_amp_stash")

    torch.manual_seed(opts.seed + rank)
    global_step = 0
    # quick hack for amp delay_unscale bug
    optimizer.zero_grad()
    optimizer.step()
    task = random.choice(TASKS)
    running = {}
    micro_steps = opts.num_train_steps * opts.gradient_accumulation_steps
    for step in range(micro_steps):
        batch = {key: value.cuda(non_blocking=True) for key, value in make_batch().items()}
        loss = model(batch, task).mean()
        running[task] = 0.8 * running.get(task, loss.item()) + 0.2 * loss.item()

        # backward pass
        delay_unscale = (step + 1) % opts.gradient_accumulation_steps != 0
        with amp.scale_loss(
            loss / opts.gradient_accumulation_steps,
            optimizer,
            delay_unscale=delay_unscale,
            loss_id=task2scaler[task],
        ) as scaled_loss:
            scaled_loss.backward()
            if not delay_unscale:
                # gather gradients from every process before unscaling, so that all use the same scale
                grads = [p.grad.data for p in model.parameters() if p.requires_grad and p.grad is not None]
                all_reduce_and_rescale_tensors(grads, float(1))

        if (step + 1) % opts.gradient_accumulation_steps == 0:
            global_step += 1
            if opts.grad_norm != -1:
                grad_norm = clip_grad_norm_(amp.master_params(optimizer), opts.grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                scale = amp._amp_state.loss_scalers[task2scaler[task]].loss_scale()
                print(
                    f"step {global_step}  {task} {loss.item()!r}  grad norm {float(grad_norm):.4f}  scale {scale}"
                )
            # one task per window, because gradients that stay scaled must all have the scale of one scaler
            task = random.choice(TASKS)
    if rank == 0:
        print("running", " ".join(f"{name} {value!r}" for name, value in sorted(running.items())))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
