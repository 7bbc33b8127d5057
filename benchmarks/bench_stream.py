"""How long does planning a step take at 4,096 ranks and 1,000 sources; does memory stay flat?

Made-up lengths, one process, no cluster: ``python benchmarks/bench_stream.py``. Reports medians
over the steps, in seconds of CPU, so that other work on the machine counts little.
"""

from __future__ import annotations

import resource
import time

import numpy as np
import reporting

import megadask as md

CONTEXT = 8192
#: Ranks, documents a rank, sources, steps.
SIZES = ((8, 8, 4, 2000), (64, 16, 4, 100), (512, 16, 100, 20), (4096, 16, 1000, 5))


def measure(ranks: int, documents: int, sources: int, steps: int) -> tuple[float, ...]:
    """Return seconds of drawing and of placing, max / mean of arrival order and balanced."""
    stream = md.Stream(
        {
            f"source{index}": md.lengths.Lognormal(300 + 10 * (index % 100), 1.2, clip=CONTEXT)
            for index in range(sources)
        },
        topology=md.ClientPlaceTree(dp=ranks),
        strategy=lambda graph: graph.cost(md.costs.Transformer(5120, 40)),
        batching=md.Packed(CONTEXT, ranks * documents, max_documents=1),
        steps=steps,
    )
    report = md.simulate(stream, clock=time.process_time)
    arrival, balanced = report.placed["none"], report.placed["assignment"]
    return (
        float(np.median(report.draw_seconds_T)),
        float(np.median(balanced.seconds_T)),
        float(arrival.imbalance_T.mean()),
        float(balanced.imbalance_T.mean()),
    )


def main() -> None:
    options = reporting.arguments(__doc__).parse_args()
    report = reporting.Report("stream", "Planning a step", options)
    report.note(f"one document a pack, up to {CONTEXT:,} tokens; medians of CPU of one process")
    rows = []
    for ranks, documents, sources, steps in SIZES[:2] if options.quick else SIZES:
        steps = min(steps, 50) if options.quick else steps
        reporting.progress(f"{steps} steps of {ranks} ranks")
        draw_s, place_s, arrival, balanced = measure(ranks, documents, sources, steps)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        times = (f"{draw_s * 1e3:.1f} ms", f"{place_s * 1e3:.1f} ms")
        evenness = (f"{arrival:.3f}", f"{balanced:.4f}")
        rows.append((ranks, ranks * documents, sources, steps, *times, *evenness, f"{peak_mb} MB"))
    report.table(
        "Time of a step, max / mean of its ranks, and memory so far",
        [
            *("ranks", "spans", "sources", "steps", "draw", "place"),
            *("arrival order", "balanced", "peak memory"),
        ],
        rows,
    )
    report.write()


if __name__ == "__main__":
    main()
