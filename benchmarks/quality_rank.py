"""One rank of `quality`: the demo's trainer, with a seed, that also looks at held-out documents.

Started by `megadask.demo.trainers.Trainers`; what it says on standard output are events as those
of ``python -m megadask.demo.train``, and "held out" with a step and a loss.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from dataclasses import asdict
from pathlib import Path

import torch
from torch import distributed

import megadask as md
from megadask.demo.group import Placement, join_group
from megadask.demo.model import DocumentTransformer, ModelConfig, loss_sum
from megadask.demo.report import RankReport
from megadask.demo.train import Trainer, train


def held_out_loss(model: torch.nn.Module, documents: list[list[int]], rank: int, of: int) -> float:
    """Return the mean loss of a target; the ranks share the documents."""
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for document in documents[rank::of]:
            tokens = torch.tensor([document[:-1]])
            length = tokens.shape[1]
            bounds = torch.tensor([[0, length]])
            logits = model(tokens, torch.arange(length)[None], bounds)
            labels = torch.tensor([document[1:]])
            sums += torch.tensor([float(loss_sum(logits, labels, torch.ones(1, length))), length])
    distributed.all_reduce(sums)
    return float(sums[0] / sums[1])


def end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def tell(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("address", "service", "report", "held-out"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("seed", "steps", "look-every", "hidden", "layers", "heads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--stop-at-eof", action="store_true")
    options = parser.parse_args()
    if options.stop_at_eof:
        threading.Thread(target=end_with_input, daemon=True).start()
    placement = Placement.from_env(os.environ)
    documents = json.loads(Path(options.held_out).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    join_group(placement, timeout_s=600.0)
    sizes = {"hidden": options.hidden, "layers": options.layers, "heads": options.heads}
    model = DocumentTransformer(ModelConfig(**sizes))
    trainer = Trainer(model, learning_rate=options.learning_rate)
    decay = torch.optim.lr_scheduler.LinearLR(trainer.optimizer, 1.0, 0.0, options.steps)
    records = []
    share = (placement.rank, placement.world_size)
    with md.connect(options.address, options.service, rank=placement.rank, timeout=600.0) as loader:
        for record in train(trainer, loader.steps(), limit=options.steps):
            records.append(record)
            decay.step()
            tell("step", rank=placement.rank, **asdict(record))
            if len(records) % options.look_every == 0:
                loss = held_out_loss(model, documents, *share)
                tell("held out", rank=placement.rank, step=len(records), loss=loss)
        stats = loader.stats()
    distributed.destroy_process_group()
    report = RankReport(
        rank=placement.rank,
        world_size=placement.world_size,
        ended="steps",
        steps=tuple(records),
        loader=stats,
    )
    Path(options.report).write_text(report.to_json())
    tell("end", rank=placement.rank, ended="steps", steps=len(records))


if __name__ == "__main__":
    main()
