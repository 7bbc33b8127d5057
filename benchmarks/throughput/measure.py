"""How long does a real model take for one document, by its length?

Times forward and backward of one layer of GPT-2 medium's width (`DocumentTransformer`, float32) on
one document at a time, and writes `steptimes.PATH`: ``python benchmarks/bench_throughput.py
--measure``. Counts CPU seconds of one thread, which other processes disturb less.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from datetime import UTC, datetime

import torch
from reporting import hardware, progress, versions
from throughput import steptimes

from megadask.demo.model import DocumentTransformer, ModelConfig, loss_sum

CONFIG = ModelConfig(hidden=1024, layers=1, heads=16)
#: A document of one token takes what every launch does: weights and gradients go through memory.
LENGTHS = (1, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
#: Tokens after which a length is not measured again, and most repetitions of one.
ENOUGH_TOKENS, MOST_REPEATS = 32768, 9


def measure() -> None:
    """Measure every length, and write the table."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DocumentTransformer(CONFIG)
    seconds(model, 256)  # makes the gradients, which are added to from now on
    rows = []
    for length in LENGTHS:
        repeats = min(MOST_REPEATS, max(1, ENOUGH_TOKENS // length))
        taken = [seconds(model, length) for _ in range(repeats)]
        rows.append({"tokens": length, "seconds": statistics.median(taken), "repeats": repeats})
        progress(f"{length:6,} tokens: {rows[-1]['seconds']:9.4f} s, median of {repeats}")
    record = {
        "model": "DocumentTransformer, hidden 1024, 1 layer, 16 heads, float32; forward and "
        "backward of one document; CPU seconds of one thread",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware(),
        "load_after": os.getloadavg()[0],
        "versions": versions(),
        "times": rows,
    }
    steptimes.PATH.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def seconds(model: DocumentTransformer, length: int) -> float:
    """Return the CPU seconds of forward and backward of one document."""
    tokens = torch.randint(0, 256, (1, length))
    mask = torch.ones(1, length)
    bounds = torch.tensor([[0, length]])
    began = time.process_time()
    logits = model(tokens, torch.arange(length)[None], bounds)
    loss_sum(logits, tokens, mask).backward()
    return time.process_time() - began
