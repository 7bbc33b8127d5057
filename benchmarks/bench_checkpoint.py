"""How many bytes does a step cost in the journal, and how long does it take to take up a run?

Steps of made-up documents are drawn from many sources, without loaders, and committed by a record
with its journal in a folder: ``python benchmarks/bench_checkpoint.py``. Reports what a step wrote
(a delta, a whole state, and for comparison the plan itself), what is left on storage at the end,
and how long reading that back takes, in seconds of CPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import reporting

import megadask as md
from megadask.checkpoints import state_at
from megadask.planner.batching import Packed
from megadask.planner.draw import DrawRules
from megadask.planner.state import PlannerState
from megadask.planner.topology import ClientPlaceTree
from megadask.scheduling.checkpoint import FULL_EVERY_STEPS, Checkpoint
from megadask.scheduling.journal import Journal
from megadask.scheduling.kept import Kept, last
from megadask.scheduling.life import Owner
from megadask.scheduling.point import Point
from megadask.scheduling.record import RunRecord

sys.path.append(str(reporting.CHECKOUT))

from tests.fakes import Driver, MemorySource, ok

LANES, RECORDS = 16, 40
SEQ_LEN, PACKS, BUCKETS = 8192, 64, 8
PLANNER = Owner("tcp://planner", "planner")


def made(sources: int, batching: Packed) -> list[MemorySource]:
    """Return sources of documents of 1 to 8,192 tokens, about 900 on average."""
    rng = np.random.default_rng(0)
    law = md.lengths.Lognormal(500, 1.1, clip=SEQ_LEN)
    return [
        MemorySource(
            f"source{index}",
            index,
            [ok(*law.sample(rng, RECORDS)["tokens"].tolist()) for _ in range(LANES)],
            batching,
        )
        for index in range(sources)
    ]


def timed(call: Callable[[], object]) -> float:
    """Return the median of the CPU seconds that a call takes, of five."""
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return float(np.median(seconds))


def measure(sources: int, steps: int, path: str) -> dict[str, str]:
    """Return the figures of a run by their names."""
    batching = Packed(seq_len=SEQ_LEN, global_batch=PACKS)
    driver = Driver(
        made(sources, batching),
        DrawRules(batching=batching, epochs=None),
        num_buckets=BUCKETS,
        # Multiples of 3 make it fetch ahead: at first every source, later what is missing.
        chunk=chain([RECORDS - 1] * 2 * sources, repeat(RECORDS)).__next__,
    )
    lanes = {source.name: LANES for source in driver.sources}
    record = RunRecord(
        name="main",
        topology=ClientPlaceTree(dp=BUCKETS),
        axis="dp",
        lanes=lanes,
        origin=Point(step=0, state=PlannerState.initial(lanes).to_json()),
        planner=PLANNER,
    )
    journal = Journal(path)
    checkpoint = Checkpoint(journal)
    checkpoint.begin(Kept.of(record, {}, []))
    written: dict[str, list[int]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    append = journal._put

    def weigh(name: str, data: bytes) -> None:
        written[name.rpartition(".")[2]].append(len(data))
        append(name, data)

    journal._put = weigh  # type: ignore[method-assign]
    for step in range(steps):
        plan = driver.plan()
        data = plan.to_arrow()
        written["plan"].append(len(data))
        written["spans"].append(plan.table.num_rows)
        begin = time.process_time()
        checkpoint.step(record.planner_point.state, data)
        seconds["step"].append(time.process_time() - begin)
        record.commit(record.generation, PLANNER.incarnation, step, 0, data)
        if checkpoint.is_full_due:
            begin = time.process_time()
            checkpoint.full(Kept.of(record, {}, []))
            seconds["full"].append(time.process_time() - begin)
        record.acknowledge(record.generation, dict.fromkeys(range(BUCKETS), (step, 0)))
        checkpoint.marks(record.low)
    left = [file.stat().st_size for file in Path(path).rglob("*") if file.is_file()]
    found = last(Journal(path).head())
    assert found is not None
    assert found.state == record.planner_point.state, "it was not restored as it was"
    files = f"{len(left):,} files, {sum(left) / 1e6:.2f} MB"
    return {
        "sources, of 16 lanes": f"{sources:,}",
        "steps": f"{steps:,}",
        "spans a step": f"{np.mean(written['spans']):,.0f}",
        "state as JSON": f"{len(found.state):,} bytes",
        "delta of a step": f"{np.mean(written['step']):,.0f} bytes (at most "
        f"{max(written['step']):,})",
        "marks of a step": f"{np.mean(written['marks']):,.0f} bytes",
        f"full, every {FULL_EVERY_STEPS} steps": f"{np.mean(written['full']):,.0f} bytes",
        "all that a step wrote": f"{written_a_step(written, steps):,.0f} bytes",
        "the plan itself": f"{np.mean(written['plan']):,.0f} bytes",
        "writing a delta": f"{1e3 * np.median(seconds['step']):.1f} ms",
        "writing in full, and pruning": f"{1e3 * np.median(seconds['full']):.1f} ms",
        "on storage at the end": files,
        "to take up the run (head)": f"{1e3 * timed(lambda: last(Journal(path).head())):.0f} ms",
        "state_at of the last step": f"{1e3 * timed(lambda: state_at(path, steps)):.0f} ms",
    }


def written_a_step(written: dict[str, list[int]], steps: int) -> float:
    """Return the bytes that all objects of a step have on average."""
    return sum(sum(written[kind]) for kind in ("step", "marks", "full")) / steps


def main() -> None:
    parser = reporting.arguments(__doc__)
    parser.add_argument("--steps", type=int, help="1,099, or 120 with --quick")
    parser.add_argument("--sources", type=int, nargs="+", help="4 and 306, or 4 with --quick")
    options = parser.parse_args()
    # The last steps then lie as far behind a full object as they can.
    steps = options.steps or (120 if options.quick else 11 * FULL_EVERY_STEPS - 1)
    counts = options.sources or ([4] if options.quick else [4, 306])
    report = reporting.Report("checkpoint", "Checkpoints", options)
    report.note(
        f"steps of {PACKS} packs of {SEQ_LEN:,} tokens; documents lognormal(500, 1.1); a window of "
        "64 spans a source; lengths in memory, no loaders"
    )
    report.note(
        "times are seconds of CPU, without waiting for the disk (a local folder, every object "
        "synced)"
    )
    report.note(
        f"{FULL_EVERY_STEPS - 1} deltas behind a full object, the most that a run of any length "
        "has to replay, where the number of steps ends in 99"
    )
    columns = []
    for sources in counts:
        reporting.progress(f"{steps} steps of {sources} sources")
        with tempfile.TemporaryDirectory() as folder:
            columns.append(measure(sources, steps, f"{folder}/run"))
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    report.table("The journal", ["what", *(f"{count} sources" for count in counts)], rows)
    report.write()


if __name__ == "__main__":
    main()
