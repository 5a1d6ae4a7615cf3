"""Fine-tune a small BERT on a classification task: FusedLAMB, accumulation, clipping by amp.master_params.

Synthetic sentences; the label says whether the first token is in the upper half of the vocabulary. Run it with:

    python -m halfpeak run [--device cpu] bert_finetune.py --fp16 --fp16_opt_level O2
"""

import argparse
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

try:
    from apex.normalization import FusedLayerNorm as BertLayerNorm
except ImportError:
    BertLayerNorm = nn.LayerNorm


def set_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


class SelfAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x, mask):
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.size(-1))
        probabilities = F.softmax(scores + mask, dim=-1)
        context = torch.einsum("bhqk,bhkd->bhqd", probabilities.type_as(v), v)
        return self.out(context.transpose(1, 2).reshape(batch, length, hidden))


class BertLayer(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.attention = SelfAttention(hidden, heads)
        self.attention_norm = BertLayerNorm(hidden, eps=1e-12)
        self.intermediate = nn.Linear(hidden, 4 * hidden)
        self.output = nn.Linear(4 * hidden, hidden)
        self.output_norm = BertLayerNorm(hidden, eps=1e-12)

    def forward(self, x, mask):
        x = self.attention_norm(x + self.attention(x, mask))
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x))))


class BertForSequenceClassification(nn.Module):
    def __init__(self, vocabulary=40, hidden=32, heads=4, layers=2, length=12, num_labels=2):
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.norm = BertLayerNorm(hidden, eps=1e-12)
        self.encoder = nn.ModuleList([BertLayer(hidden, heads) for _ in range(layers)])
        self.pooler = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, num_labels)

    def forward(self, input_ids, attention_mask, labels=None):
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.positions(positions))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.encoder:
            x = layer(x, mask)
        logits = self.classifier(torch.tanh(self.pooler(x[:, 0])))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        return loss, logits


def load_examples(size=256, length=12, vocabulary=40):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, vocabulary, (size, length), generator=generator)
    lengths = torch.randint(length // 2, length + 1, (size, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    labels = (ids[:, 0] >= vocabulary // 2).long()
    return TensorDataset(ids * mask, mask, labels)


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, lr_lambda)


def train(args, train_dataset, model):
    sampler = RandomSampler(train_dataset)
    dataloader = DataLoader(train_dataset, sampler=sampler, batch_size=args.train_batch_size)
    t_total = len(dataloader) // args.gradient_accumulation_steps * args.num_train_epochs

    no_decay = ["bias", "norm"]
    parameters = list(model.named_parameters())
    optimizer_grouped_parameters = [
        {
            "params": [p for n, p in parameters if not any(nd in n for nd in no_decay)],
            "weight_decay": args.weight_decay,
        },
        {"params": [p for n, p in parameters if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    if args.optimizer == "lamb":
        from apex.optimizers import FusedLAMB

        optimizer = FusedLAMB(optimizer_grouped_parameters, lr=args.learning_rate)
    else:
        optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=args.learning_rate)
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError(
                "Please install apex from https://www.github.com/nvidia/apex to use fp16 training."
            )
        amp.register_half_function(torch, "einsum")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    scheduler = get_linear_schedule_with_warmup(optimizer, args.warmup_steps, t_total)

    global_step = 0
    logged = 0.0
    model.zero_grad()
    set_seed(args.seed)
    for _ in range(args.num_train_epochs):
        for step, batch in enumerate(dataloader):
            model.train()
            batch = tuple(t.to(args.device) for t in batch)
            loss, _ = model(batch[0], batch[1], labels=batch[2])
            if args.gradient_accumulation_steps > 1:
                loss = loss / args.gradient_accumulation_steps
            if args.fp16:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            logged += loss.item()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                if args.fp16:
                    norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
                else:
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                model.zero_grad()
                global_step += 1
                if global_step % args.logging_steps == 0:
                    print(
                        f"step {global_step}  loss {logged / args.logging_steps!r}  grad norm {float(norm):.4f}"
                    )
                    if args.fp16:
                        from apex.amp import _amp_state

                        print(f"loss scale {_amp_state.loss_scalers[0]._loss_scale}")
                    logged = 0.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", default=16, type=int)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--optimizer", choices=["lamb", "adamw"], default="lamb")
    parser.add_argument("--learning_rate", default=1e-2, type=float)
    parser.add_argument("--weight_decay", default=0.01, type=float)
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    parser.add_argument("--num_train_epochs", default=4, type=int)
    parser.add_argument("--warmup_steps", default=4, type=int)
    parser.add_argument("--logging_steps", type=int, default=8)
    parser.add_argument("--no_cuda", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--fp16_opt_level", type=str, default="O1")
    args = parser.parse_args()
    args.device = torch.device("cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu")
    args.n_gpu = torch.cuda.device_count()
    set_seed(args.seed)
    model = BertForSequenceClassification()
    model.to(args.device)
    train(args, load_examples(), model)


if __name__ == "__main__":
    main()
