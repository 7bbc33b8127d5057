"""Does c0 + a l + b l^2 describe what a transformer takes, and does a linear law?

Times the training step (forward and backward) of a small torch transformer on one CPU thread, one
document a launch, and fits `costs.Measured`: ``python benchmarks/bench_cost_fit.py``. Prints a
table; ``--report`` writes it to benchmarks/reports/DATE-cost-fit.md too.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from megadask.planner import costs

LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
HIDDEN, LAYERS, HEADS = 64, 2, 4
#: Time of one length that is measured, after its warm-up, and the fewest launches in it.
BUDGET_S, LEAST = 1.5, 7


class Model(nn.Module):
    """A causal transformer without an output layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the last hidden states of documents x: (1, l, HIDDEN)."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, mask=mask, is_causal=True).sum()


def measure(model: Model, length: int) -> float:
    """Return the median of the seconds of a training step over one document."""
    x = torch.randn(1, length, HIDDEN)
    taken: list[float] = []
    for _ in range(2):
        model(x).backward()
    while len(taken) < LEAST or sum(taken) < BUDGET_S:
        began = time.perf_counter()
        model(x).backward()
        taken.append(time.perf_counter() - began)
    return float(np.median(taken))


def main() -> None:
    """Print the table and the fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", action="store_true", help="write a dated report too")
    wants_report = parser.parse_args().report
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    samples = [(length, measure(model, length)) for length in LENGTHS]
    cost = costs.Measured(samples)
    fit = cost.fit
    assert fit is not None
    lines = [f"{'tokens':>7}{'measured':>13}{'fitted':>13}{'linear law':>13}"]
    for row in zip(LENGTHS, fit.seconds, fit.fitted_s, fit.linear_s, strict=True):
        lines.append(f"{row[0]:7}" + "".join(f"{value * 1e3:10.2f} ms" for value in row[1:]))
    lines += ["", cost.report()]
    table = "\n".join(lines)
    print(table)
    if wants_report:
        today = datetime.date.today().isoformat()
        path = Path(__file__).parent / "reports" / f"{today}-cost-fit.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"# Cost of a document by its length, {today}\n\n`python benchmarks/bench_cost_fit.py "
            f"--report`; {LAYERS} layers of width {HIDDEN}, {HEADS} heads, causal, forward and "
            f"backward, one thread of {platform.machine()}, Python {platform.python_version()}, "
            f"torch {torch.__version__}, numpy {np.__version__}. Medians.\n\n```\n{table}\n```\n"
        )


if __name__ == "__main__":
    main()
