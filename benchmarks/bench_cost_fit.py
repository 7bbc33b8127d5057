"""Does c0 + a l + b l^2 describe what a transformer takes, and does a linear law?

Times the training step (forward and backward) of a small torch transformer on one CPU thread and
fits `costs.Measured`, first to launches of one document each, then also to launches of 4,096 tokens
in documents of equal length: ``python benchmarks/bench_cost_fit.py``. Counts CPU seconds, so that
other processes disturb less, over rounds of all launches.
"""

from __future__ import annotations

import time

import numpy as np
import reporting
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadask.planner import costs

LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
HIDDEN, LAYERS, HEADS = 64, 2, 4
#: Documents of a launch and their length.
ALONE = [(1, length) for length in LENGTHS]
PACKED = [(4096 // length, length) for length in (64, 128, 256, 512, 1024, 2048)]
#: Rounds over all launches, after one to warm up, and repetitions in each.
ROUNDS, REPEATS = 7, 3

Sample = tuple[list[int], float]


class Block(nn.Module):
    """One layer: causal attention and a feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(2)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.ffn = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (documents, l, HIDDEN), from the same."""
        shape = (*x.shape[:2], HEADS, HIDDEN // HEADS)
        q, k, v = (
            part.reshape(shape).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.ffn(self.norms[1](x))


def measure(rounds: int) -> list[Sample]:
    """Return the lengths of every launch and the median of the CPU seconds of its training step."""
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    launches = [*ALONE, *PACKED]
    taken: list[list[float]] = [[] for _ in launches]
    for round_number in range(rounds + 1):
        for (count, length), seconds in zip(launches, taken, strict=True):
            x = torch.randn(count, length, HIDDEN)
            for _ in range(REPEATS):
                began = time.process_time()
                model(x).sum().backward()
                if round_number:
                    seconds.append(time.process_time() - began)
    medians = [float(np.median(seconds)) for seconds in taken]
    return [([n] * count, taken) for (count, n), taken in zip(launches, medians, strict=True)]


def fit(report: reporting.Report, title: str, samples: list[Sample], *, per_launch: bool) -> None:
    """Report what was measured beside the law and the linear one, and how good the fit is."""
    cost = costs.Measured(samples, per_launch=per_launch)
    found = cost.fit
    assert found is not None
    rows = zip(samples, found.seconds, found.fitted_s, found.linear_s, strict=True)
    report.table(
        title,
        ["documents", "measured", "fitted", "linear law"],
        [
            (f"{len(of)} x {of[0]}", *(f"{value * 1e3:.2f} ms" for value in seconds))
            for (of, _), *seconds in rows
        ],
    )
    report.text("The fit", cost.report())


def main() -> None:
    options = reporting.arguments(__doc__).parse_args()
    rounds = 1 if options.quick else ROUNDS
    report = reporting.Report("cost-fit", "Cost of a document by its length", options)
    report.note(
        f"{LAYERS} causal layers of width {HIDDEN}, {HEADS} heads, forward and backward; CPU "
        f"seconds of one thread, medians of {rounds * REPEATS}"
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    samples = measure(rounds)
    fit(report, "One document a launch", samples[: len(ALONE)], per_launch=False)
    fit(report, "And 4,096 tokens a launch", samples, per_launch=True)
    report.write()


if __name__ == "__main__":
    main()
