"""Fine-tuning as people did it with the transformers of 2019: optional fp16, accumulation, clipping."""

import argparse
import logging

import torch
from torch.optim.lr_scheduler import LambdaLR

logger = logging.getLogger(__name__)
losses = []


def train(args, batches, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, eps=1e-8)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / 20)
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("Please install apex from https://www.github.com/nvidia/apex to use fp16 training.")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level, verbosity=0)

    model.zero_grad()
    for step, batch in enumerate(batches):
        batch = tuple(t.to("cpu") for t in batch)
        inputs = {"input": batch[0]}
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs, batch[1])
        if args.gradient_accumulation_steps > 1:
            loss = loss / args.gradient_accumulation_steps

        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        losses.append(loss.detach().clone())
        if (step + 1) % args.gradient_accumulation_steps == 0:
            if args.fp16:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            model.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", default=5e-3, type=float)
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    parser.add_argument("--gradient_accumulation_steps", default=2, type=int)
    parser.add_argument("--fp16", action="store_true", default=True)
    parser.add_argument("--opt-level", dest="fp16_opt_level", type=str, default="O1",
                        help="For fp16: Apex AMP optimization level selected in ['O0', 'O1', 'O2', and 'O3']."
                             "See details at https://nvidia.github.io/apex/amp.html")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    train(args, [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(8)], model)


if __name__ == "__main__":
    main()
