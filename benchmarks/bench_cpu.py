"""How much CPU time does the whole path of a token take, beside a plain torch DataLoader?

CPU seconds (user and system) of all processes, per million tokens, between two steps in the middle
of passes that take turns: of MegaDask the scheduler, the Dask workers and two ranks, of torch two
ranks and as many loader processes as there are Dask workers. Both read the same Parquet files of
web documents with the same reader and transform. Ranks take steps as fast as they come. What idle
processes take is read after the last step of each pass: ``python benchmarks/bench_cpu.py``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from reporting import Report, arguments, progress, spread

if TYPE_CHECKING:
    from flow.corpus import Web
    from throughput.ranks import Slot
    from throughput.systems import Feed

KINDS = ("bytes", "bpe")
SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH = 4096, 32, 4
#: Dask workers, and loader processes of the DataLoaders of all ranks.
WORKERS = 2
PASSES = 5
#: Steps that are left out, and steps that count.
#: More are left out than are built ahead, so that none of what counts was made before.
WARM, STEPS = 10, 80
SETTLE_S, IDLE_S = 10.0, 5.0
TORCH, MEGADASK, SAME = "DataLoader", "MegaDask", "MegaDask, the same two tensors"
KEYS = ("tokens", "labels")
#: What MegaDask was to take at most, of the DataLoader's CPU time.
MOST_RATIO = 1.15


@dataclass(frozen=True, kw_only=True)
class Pass:
    """CPU time of one pass by what processes do.

    Attributes
    ----------
    tokens
        Tokens that the ranks were given.
    seconds
        In which that was.
    cpu_s
        CPU seconds in that time.
    idle_s
        CPU seconds of one second in which nothing is asked for.
    """

    tokens: int
    seconds: float
    cpu_s: dict[str, float]
    idle_s: dict[str, float]

    @property
    def per_million(self) -> float:
        """CPU seconds per million tokens."""
        return sum(self.cpu_s.values()) / self.tokens * 1e6

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Pass:
        """Return what the ranks wrote down."""
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        (busy, _, idle) = (
            {name: after[name] - before[name] for name in after}
            for before, after in pairwise(found[0]["marks"])
        )
        seconds, idle_s = busy.pop("time"), idle.pop("time")
        return cls(
            tokens=sum(one["tokens"] for one in found),
            seconds=seconds,
            cpu_s=busy,
            idle_s={name: spent / idle_s for name, spent in idle.items()},
        )


def run_pass(
    slot: Slot, feed: Feed, parties: Mapping[str, tuple[int, ...]], options: argparse.Namespace
) -> Pass:
    """Let the ranks go through the steps of a pass."""
    from flow.corpus import RANKS
    from flow.feeds import Limited, Metered, Stretch

    with tempfile.TemporaryDirectory() as folder:
        stretch = Stretch(
            warm=options.warm,
            steps=options.steps,
            settle_s=options.settle,
            idle_s=options.idle,
            parties=parties,
            trainers=slot.pids,
            folder=Path(folder),
        )
        limited = Limited(feed=feed, num_steps=options.warm + options.steps)
        slot.run(limited, RANKS, functools.partial(Metered, stretch=stretch))
        return Pass.read(Path(folder), RANKS)


def measure(
    webs: list[Web], folder: Path, options: argparse.Namespace
) -> dict[str, dict[str, list[Pass]]]:
    """Return the passes of every system, by the kind of tokens."""
    from distributed import Client
    from flow.corpus import RANKS
    from flow.feeds import Plain
    from throughput.ranks import Slot
    from throughput.systems import MegaDask

    import megadask as md
    from megadask.demo.cluster import local_cluster

    found: dict[str, dict[str, list[Pass]]] = {
        web.kind: {name: [] for name in (TORCH, MEGADASK, SAME)} for web in webs
    }
    with ExitStack() as stack:
        cluster = stack.enter_context(local_cluster(WORKERS, folder))
        workers = [child.pid for child in psutil.Process().children(recursive=True)]
        parties = {"scheduler": (os.getpid(),), "Dask workers": tuple(workers)}
        client = stack.enter_context(Client(cluster, set_as_default=False))
        # MegaDask's ranks leave threads behind, which no DataLoader should fork.
        own, other = (stack.enter_context(Slot(RANKS)) for _ in range(2))
        for number in range(options.passes):
            for web in webs:
                plain = Plain(
                    web=web,
                    seq_len=SEQ_LEN,
                    micro_batch=MICRO_BATCH,
                    microbatches=GLOBAL_BATCH // MICRO_BATCH // RANKS,
                    workers=WORKERS // RANKS,
                )
                passes = found[web.kind]
                passes[TORCH].append(run_pass(other, plain, {}, options))
                for name, keys in ((MEGADASK, None), (SAME, KEYS)):
                    pipeline = web.pipeline(SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH)
                    with md.serve(pipeline, client) as service:
                        feed = MegaDask(address=service.address, keys=keys)
                        passes[name].append(run_pass(own, feed, parties, options))
                seen = {name: round(some[-1].per_million, 3) for name, some in passes.items()}
                progress(f"pass {number + 1}, {web.kind}: {seen}")
    return found


def tell(report: Report, web: Web, found: Mapping[str, list[Pass]]) -> None:
    """Print the tables of one kind of tokens."""
    base = found[TORCH]
    rows = []
    for name, passes in found.items():
        ratios = [a.per_million / b.per_million for a, b in zip(passes, base, strict=True)]
        rows.append(
            [
                name,
                spread([one.per_million for one in passes], 3),
                "1" if passes is base else spread(ratios),
                spread([one.tokens / one.seconds / 1e6 for one in passes]),
                spread([sum(one.idle_s.values()) * 100 for one in passes], 1, "%"),
            ]
        )
        if name == MEGADASK:
            what = f"{web.kind}: CPU time of MegaDask / DataLoader"
            report.goal(what, statistics.median(ratios), most=MOST_RATIO)
    columns = [
        "",
        "CPU s per million",
        "of the DataLoader's",
        "million tokens/s",
        "idle, of a core",
    ]
    report.table(str(web), columns, rows)
    parties = ["scheduler", "Dask workers", "trainers", "loader processes"]
    rows = [[name, *(_share(passes, party) for party in parties)] for name, passes in found.items()]
    report.table(f"{web.kind}: CPU s per million tokens, by process", ["", *parties], rows)


def _share(passes: list[Pass], party: str) -> str:
    some = [one.cpu_s[party] / one.tokens * 1e6 for one in passes if party in one.cpu_s]
    return f"{statistics.median(some):.3f}" if some else "-"


def figures(found: Mapping[str, Mapping[str, list[Pass]]]) -> dict[str, Any]:
    """Return all passes as they go into the JSON."""
    return {
        kind: {name: [vars(one) for one in passes] for name, passes in systems.items()}
        for kind, systems in found.items()
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--passes", type=int, help="of each system; 5, or 1 with --quick")
    parser.add_argument("--steps", type=int, help="that count; 80, or 12 with --quick")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="both; bytes with --quick")
    options = parser.parse_args()
    quick = options.quick
    options.passes = options.passes or (1 if quick else PASSES)
    options.steps = options.steps or (12 if quick else STEPS)
    options.warm = 8 if quick else WARM
    options.settle, options.idle = (1.0, 1.0) if quick else (SETTLE_S, IDLE_S)
    kinds = options.kinds or (("bytes",) if quick else KINDS)
    # Not above: the processes of Dask import this file, and have no use for torch.
    from flow import corpus

    report = Report("cpu", "CPU time of loading", options)
    with tempfile.TemporaryDirectory(prefix="bench-cpu-") as folder:
        tokens = 1_000_000 if quick else 16_000_000
        webs = [corpus.write(kind, Path(folder) / kind, tokens, SEQ_LEN) for kind in kinds]
        for line in (
            f"{corpus.RANKS} ranks; {GLOBAL_BATCH} packs of {SEQ_LEN:,} tokens a step, "
            f"{MICRO_BATCH} a microbatch; {WORKERS} Dask workers, or loader processes of the "
            "DataLoaders together",
            "the DataLoader concatenates documents, cuts them into packs, and gives tokens and "
            "labels; MegaDask packs whole documents, and gives all tensors of docs/batches.md",
            f"medians of {options.passes} passes that take turns, least and largest behind them; "
            f"{options.steps} steps after {options.warm}; ratios are those of one turn",
        ):
            report.note(line)
        found = measure(webs, Path(folder), options)
    for web in webs:
        tell(report, web, found[web.kind])
    report.say(
        "What MegaDask does beyond the DataLoader it does per step and document, whatever the "
        "transform costs: it describes samples and plans them, carries them from loaders to "
        "constructors in messages, packs whole documents with their bounds, hands batches out by "
        "calls. Beside a transform that is no more than a copy of bytes, that is most of the time."
    )
    report.figures |= figures(found)
    report.write()


if __name__ == "__main__":
    main()
