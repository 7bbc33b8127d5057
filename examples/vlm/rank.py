"""One rank of the example: a plain torch loop. Started by train.py.

Every line that it prints is a JSON object with an ``event``: "ready", "step" or "error".
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext

import torch
from model import MERGE, VisionLanguageModel
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import megadask as md
from megadask.demo.group import Placement, join_group


def main() -> None:
    """Train until there were so many steps."""
    options = _options()
    placement = Placement.from_env(os.environ)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    join_group(placement, timeout_s=60)
    try:
        with md.connect(options.address, rank=placement.rank) as loader:
            say("ready", rank=placement.rank)
            train(loader, placement, options.steps)
    except Exception as error:
        say("error", rank=placement.rank, time_s=time.time(), what=repr(error))
        raise
    finally:
        distributed.destroy_process_group()


def train(loader: md.Loader, placement: Placement, num_steps: int) -> None:
    """Train, and say of every step what came of it."""
    model = DistributedDataParallel(VisionLanguageModel(distributed.new_group()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number, step in enumerate(loader.steps(), 1):
        began = time.perf_counter()
        total = torch.zeros(1)
        encoded, used = [], []
        for batch in step:
            with nullcontext() if batch["is_last"] else model.no_sync():
                loss = model(batch)
                # A sum over the targets of all ranks, of which DDP takes the mean over ranks.
                (loss / step.num_loss_tokens * placement.world_size).backward()
            total += loss.detach()
            encoded.append(len(batch["image"]))
            used.append(MERGE**2 * int((batch["image_index"] >= 0).sum()))
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(total)
        say(
            "step",
            rank=placement.rank,
            step=number - 1,
            loss=float(total) / step.num_loss_tokens,
            encoded=encoded,
            used=used,
            step_s=time.perf_counter() - began,
        )
        if number == num_steps:
            return


def say(event: str, **fields: object) -> None:
    """Print a line of JSON."""
    print(json.dumps({"event": event, **fields}), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of the example.")
    parser.add_argument("--address", required=True, help="address of the Dask scheduler")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--report", help="not used: all is said on standard output")
    parser.add_argument("--stop-at-eof", action="store_true", help="end with whoever started it")
    options = parser.parse_args()
    if options.stop_at_eof:
        threading.Thread(target=_stop_at_eof, daemon=True).start()
    return options


def _stop_at_eof() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
