"""Does a run survive everything, for as long as it lasts? And how long do trainers wait for it?

The demo's pipeline feeds ranks that are processes of their own, while a schedule of faults from a
seed befalls them: workers and trainers are killed, stopped and continued, workers are retired and
added, the topology and the mixture change, and everything ends and goes on from the saved state on
a new cluster: ``make soak MINUTES=10``, or ``make soak MINUTES=10 SEED=7`` for a schedule again.

At the end the service's audit and an account of all ids, by what the ranks say that they were
given, must agree that every sample came once, and in the step in which a run without faults has it.
Before that, workers are killed one by one in a quiet run, to see how long trainers wait for what
they held. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import reporting

sys.path.append(str(reporting.CHECKOUT))

from soaking.faults import TOPOLOGIES, Doer
from soaking.party import Party
from soaking.recovery import Kill, kill_again_and_again
from soaking.schedule import Fault, schedule
from soaking.undisturbed import spans_of_steps

import megadask as md
from megadask.demo.corpus import Corpus, build_corpus
from megadask.demo.run import Demo

#: Small packs, so that steps are many.
DEMO = Demo(dp=2, seq_len=2048)
CORPUS = reporting.CHECKOUT / "build" / "soak"
CORPUS_BYTES = 20_000_000
BATCH_S = 0.05
LIMITS = md.Limits(silent_s=4.0)
#: What is hidden by steps that are ready is no wait: as few of them as there can be.
RECOVERY_LIMITS = md.Limits(lead_steps=1)
WORKERS = 4
RECOVERIES = (("loader", 1), ("loader", 0), ("constructor", 1), ("planner", 1))


def pipeline(corpus: Corpus, dp: int) -> md.Pipeline:
    """Return the demo's pipeline for so many ranks, with two loaders a source, and shadows."""
    whole = DEMO.pipeline(corpus, "assignment")
    sources = [replace(source, loaders=2, shadows=1) for source in whole.sources]
    return replace(whole, sources=sources, topology=md.ClientPlaceTree(dp=dp))


def waits_after(party: Party, faults: Sequence[tuple[Fault, float]]) -> list[float]:
    """Return for each fault the longest time without a batch, until the next fault.

    Of ranks that there are in every topology: others are away for as long as it is small.
    """
    arrivals: dict[int, list[float]] = defaultdict(list)
    for _, got_s, rank, _ in party.waits:
        arrivals[rank].append(got_s)
    ends = [began_s for _, began_s in faults[1:]] + [float("inf")]
    found = []
    for (_, began_s), end_s in zip(faults, ends, strict=True):
        longest = BATCH_S
        for times in (arrivals[rank] for rank in range(min(TOPOLOGIES))):
            for before, after in pairwise(times):
                if after > began_s and before < end_s:
                    longest = max(longest, after - before)
        found.append(longest - BATCH_S)
    return found


def soak(
    report: reporting.Report, corpus: Corpus, folder: Path, seed: int, seconds: float
) -> list[str]:
    """Let a schedule of faults befall a run, and report what became of it; return what is wrong."""
    done: list[tuple[Fault, float]] = []
    names = sorted(corpus.sources)
    with Party(
        lambda dp: pipeline(corpus, dp),
        workers=WORKERS,
        limits=LIMITS,
        checkpoint=str(folder / "journal"),
        batch_s=BATCH_S,
    ) as party:
        party.open(2)
        doer = Doer(party, names)
        for rank in party.ranks:
            rank.wait_for_event("state")
        began_s = time.monotonic()
        for fault in schedule(seed):
            if fault.quiet_s is not None:
                party.wait_for_batches()
                time.sleep(fault.quiet_s)
            if time.monotonic() - began_s > seconds or party.errors:
                break
            reporting.progress(f"{time.monotonic() - began_s:6.1f} s  {fault.kind}")
            done.append((fault, doer.do(fault)))
        if not party.errors:
            party.finish()
        took_s = time.monotonic() - began_s
        audit = party.service.audit()
    total = audit["total"]["samples"]
    expected = spans_of_steps(pipeline(corpus, 1), doer.mixtures, party.account.num_steps)
    wrong = [*party.errors, *party.account.compare(expected)]
    if not audit["ok"]:
        wrong.append(f"the audit says {total}")
    waits = waits_after(party, done)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for (fault, _), wait_s in zip(done, waits, strict=True):
        by_kind[fault.kind].append(wait_s)
    report.table(
        f"{took_s:,.0f} s under faults, seed {seed}",
        ["what", "count"],
        [
            ("faults", len(done)),
            ("steps", party.account.num_steps),
            ("spans delivered", f"{party.account.num_spans:,}"),
            ("lost", "0" if not wrong else "see below"),
            ("repeated", "0" if not wrong else "see below"),
            ("samples lost, by the audit since the last restart", total["lost"]),
            ("samples repeated, by the audit since the last restart", total["repeated"]),
            (
                "microbatches given again to the successor of a killed trainer",
                party.account.retaken,
            ),
        ],
    )
    report.table(
        "Killed processes, by what they held (one may hold several roles)",
        ["role", "kills"],
        sorted(doer.kills.items()),
    )
    report.table(
        "Longest time that a rank was without a batch, ms",
        ["after", "faults", "p50", "p99", "largest"],
        [
            (kind, len(found), *(f"{1e3 * np.percentile(found, q):,.0f}" for q in (50, 99, 100)))
            for kind, found in [("all", waits), *sorted(by_kind.items())]
        ],
    )
    report.figures["faults"] = [
        {**asdict(fault), "wait_s": wait_s} for (fault, _), wait_s in zip(done, waits, strict=True)
    ]
    report.figures["kills"] = dict(Counter(doer.kills))
    report.figures["audit"] = audit
    for line in wrong:
        report.say(f"wrong: {line}")
    return wrong


def recover(report: reporting.Report, corpus: Corpus, kills: int) -> None:
    """Kill workers in a quiet run, and report how long trainers waited."""
    rows, raw = [], {}
    for role, shadows in RECOVERIES:
        name = f"{role}, {'with' if shadows else 'without'} shadows"
        reporting.progress(f"killing {kills} workers: {name}")
        found = kill_again_and_again(
            lambda dp: pipeline(corpus, dp),
            role,
            shadows=shadows,
            kills=kills,
            limits=RECOVERY_LIMITS,
            batch_s=BATCH_S,
        )
        raw[name] = [asdict(kill) for kill in found]
        rows.append((name, kills, *(_ms(found, *fields) for fields in _FIELDS.values())))
    report.table(
        "Workers killed in a quiet run: medians in ms (least - largest)",
        ["the worker of a", "kills", *_FIELDS],
        rows,
    )
    report.figures["recovery"] = raw


_FIELDS = {
    "noticed after": ("noticed_s",),
    "roles moved after": ("moved_s",),
    "a step takes": ("step_s",),
    "longest wait before": ("quiet_s",),
    "longest wait after": ("worst_s",),
}


def _ms(found: Sequence[Kill], name: str) -> str:
    return reporting.spread([1e3 * getattr(kill, name) for kill in found], digits=0)


def main() -> int:
    """Soak, report, and return the exit status."""
    parser = reporting.arguments(__doc__)
    parser.add_argument("--minutes", type=float, help="of faults; 10, or a half with --quick")
    parser.add_argument("--seed", type=int, help="of the schedule; any when it is not given")
    parser.add_argument("--kills", type=int, help="of each role in the quiet run; 6, or 1 if quick")
    options = parser.parse_args()
    minutes = options.minutes or (0.5 if options.quick else 10.0)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    kills = (1 if options.quick else 6) if options.kills is None else options.kills
    reporting.progress(f"seed {seed}")
    report = reporting.Report("soak", "Soak", options)
    report.note(
        f"{WORKERS} workers in processes, every other one with a nanny; ranks in processes; "
        f"{1e3 * BATCH_S:.0f} ms a microbatch, 2 or 4 of them a step; the demo's corpus and "
        f"pipeline with packs of {DEMO.seq_len:,} tokens, two loaders a source and a shadow each"
    )
    report.note(
        f"under faults Limits(silent_s={LIMITS.silent_s:g}); in the quiet run Limits("
        f"lead_steps={RECOVERY_LIMITS.lead_steps}), so that little is ready when a worker dies"
    )
    corpus = build_corpus(CORPUS, max_bytes=CORPUS_BYTES, progress=reporting.progress)
    for logger in ("megadask", "distributed"):  # what dies complains
        logging.getLogger(logger).addHandler(logging.NullHandler())
        logging.getLogger(logger).propagate = False
    with tempfile.TemporaryDirectory(prefix="megadask-soak-") as name:
        folder = Path(name)
        if kills:
            recover(report, corpus, kills)
        wrong = soak(report, corpus, folder, seed, 60 * minutes)
    report.say("Every sample came once, in its step." if not wrong else "Samples are missing.")
    report.write()
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    sys.exit(main())
