"""Ranks of ``test_transformers_ranks.py``: transformers' Trainer over FSDP2, beside a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor

from distributed.launching import Refusals
from halfpeak.integrations.transformers import HalfpeakTrainer
from integrations.shard_loop import (
    EVERY,
    HALF,
    KEPT,
    OPTIMIZERS,
    PASSES,
    SCALE,
    as_torchrun,
    batch,
    net,
    on_accelerators,
    own,
    same,
    whole,
)


class Trainer(HalfpeakTrainer):
    """Trains on the batches of the loop of one's own, in their order, and keeps the losses."""

    def __init__(self, *args: Any, name: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name, self.losses = name, list[str]()

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = OPTIMIZERS[self.name](self.model.parameters())
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        return self.lr_scheduler

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **kwargs: Any) -> Tensor:
        loss = model(batch(int(inputs["number"]))).float().square().mean()
        self.losses.append(repr(loss.item()))
        return loss


def make_trainer(level: str, folder: Path, name: str = "AdamW", **config: Any) -> Trainer:
    on_accelerators()
    blocks = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["Block"]}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        fsdp=True,
        fsdp_config={**blocks, **config},
        per_device_train_batch_size=1,
        gradient_accumulation_steps=EVERY,
        max_grad_norm=0.5,
        num_train_epochs=1,
        save_strategy="steps",
        save_steps=HALF // EVERY,
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
    )
    # Ranks get the items in turn.
    data: Any = [{"number": item // dist.get_world_size()} for item in range(PASSES * dist.get_world_size())]
    options = {"scale": SCALE, "keep_fp32": KEPT}
    return Trainer(net(), arguments, train_dataset=data, name=name, level=level, options=options)


def see(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    as_torchrun(rank, ranks)
    saved = folder.parent / "saved"
    at = saved / f"checkpoint-{HALF // EVERY}"
    if ranks == 1:
        trainer = make_trainer("O2", folder, state_dict_type="SHARDED_STATE_DICT")
        trainer.train(resume_from_checkpoint=str(at))
        return {"weights": whole(trainer.model)}
    seen: dict[str, Any] = {}
    for level, name in (("O1", "AdamW"), ("O5", "FusedAdamW")):
        (losses, _), model = own(level, name)
        trainer = make_trainer(level, folder / level, name)
        trainer.train()
        seen[f"{level} {name}"] = [trainer.losses == losses, same(whole(trainer.model), whole(model))]
    (losses, _), model = own("O2")
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        to = saved if kind == "SHARDED_STATE_DICT" else folder / "full"
        trainer = make_trainer("O2", to, state_dict_type=kind)
        trainer.train()
        seen["O2 AdamW"] = [trainer.losses == losses, same(whole(trainer.model), whole(model))]
        again = make_trainer("O2", folder / "again", state_dict_type=kind)
        again.train(resume_from_checkpoint=str(to / at.name))
        counters = again.accelerator.scaler.state_dict()["counters"]
        found = [again.losses == losses[HALF:], same(whole(again.model), whole(model)), counters]
        seen[kind] = found
    seen["weights"] = whole(model)
    again.save_model(str(folder / "final"))
    dist.barrier()
    final = load_file(folder / "final" / "model.safetensors")
    of_parameters = {name: final[name] for name in seen["weights"]}
    seen["final"] = [str(final["head.weight"].dtype), same(of_parameters, seen["weights"])]
    refused = Refusals()

    @refused("ConfigError: cpu_ram_efficient_loading= cannot be combined with a level")
    def loaded_on_one_rank() -> None:
        make_trainer("O2", folder, cpu_ram_efficient_loading=True)

    seen["refusals"] = dict(refused)
    return seen
