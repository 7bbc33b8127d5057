"""What the demo's trainers measured, and the table that it is summed up in.

A phase is one whole run of loaders and trainers; the demo runs one per placement of samples and
compares them. Nothing here needs torch, Dask or a clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, isnan, nan
from statistics import fmean
from typing import Any, Literal, get_args

from megadask.planner.errors import StateError

Ended = Literal["end", "signal", "steps"]

#: Version of the JSON form of `RankReport`.
VERSION = 1

#: Counts of an audit that the table shows.
AUDIT_COUNTS = ("planned", "delivered", "repeated", "lost", "skipped")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step as one rank saw it.

    Parameters
    ----------
    step
        Index of the step.
    loss
        Mean loss of a target, over all ranks.
    tokens, loss_tokens
        Real tokens and targets of this rank's microbatches.
    num_microbatches
        Microbatches of this rank.
    planned_imbalance
        Largest bucket cost of the step over the mean, as planned.
    wait_s
        Seconds that this rank waited for data.
    compute_s
        Seconds of forward and backward passes, without waiting for other ranks.
    compute_cpu_s
        Seconds of those in which the trainer had a core: what ``compute_s`` would be on a machine
        that ran nothing else.
    step_s
        Seconds of the whole step: data, compute, reduction, optimiser.
    """

    step: int
    loss: float
    tokens: int
    loss_tokens: int
    num_microbatches: int
    planned_imbalance: float
    wait_s: float
    compute_s: float
    compute_cpu_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """All steps of one rank.

    Parameters
    ----------
    rank, world_size
        Which trainer of how many.
    ended
        Why it stopped: the data ended, it was told to, or it had made the steps asked for.
    steps
        Its steps in order.
    loader
        ``stats()`` of its loader.
    """

    rank: int
    world_size: int
    ended: Ended
    steps: tuple[StepRecord, ...]
    loader: Mapping[str, Any]

    def to_json(self) -> str:
        """Return the report as one line of JSON; see `from_json`."""
        return json.dumps({"version": VERSION, **asdict(self)}, default=str)

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        """Invert `to_json`. Raises StateError for another version's report."""
        fields = json.loads(text)
        version = fields.pop("version", None)
        if version != VERSION:
            raise StateError("trainer report of another version", got=version, limit=VERSION)
        if fields["ended"] not in get_args(Ended):
            raise StateError("trainer report", got=fields["ended"], limit=get_args(Ended))
        steps = tuple(StepRecord(**step) for step in fields.pop("steps"))
        return cls(steps=steps, **fields)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """All that is known of one phase when it is over.

    Parameters
    ----------
    name
        How the table calls it.
    ranks
        Report of every rank.
    audit, stats
        What the service's ``audit()`` and ``stats()`` returned after the last step.
    """

    name: str
    ranks: tuple[RankReport, ...]
    audit: Mapping[str, Any]
    stats: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Figures of one phase. All but the losses leave out the first step, which warms up.

    Parameters
    ----------
    num_steps
        Steps that all ranks made.
    loss_start, loss_end
        Loss of the first and the last of them.
    tokens_per_s
        Real tokens of all ranks a second.
    step_s
        Mean seconds of a step; ``tokens_per_s`` is its tokens over that.
    planned_imbalance, measured_imbalance
        Largest rank's cost or CPU seconds of compute over the ranks' mean, mean of the steps.
    packing
        Real tokens over what the packs have room for, in all steps that were planned.
    wait_share
        Share of the step time that ranks waited for data.
    loader_bytes
        Resident memory of the workers that hold the loaders.
    num_workers
        Processes that this is the sum of.
    audit
        Samples by `AUDIT_COUNTS`.
    num_pending
        Samples that were planned for steps after the last one made.
    """

    num_steps: int
    loss_start: float
    loss_end: float
    tokens_per_s: float
    step_s: float
    planned_imbalance: float
    measured_imbalance: float
    packing: float
    wait_share: float
    loader_bytes: int
    num_workers: int
    audit: Mapping[str, int]
    num_pending: int


def summarize(phase: Phase) -> Summary:
    """Return the figures of a phase. Raises StateError if no step was made by all ranks."""
    steps = _steps(phase)
    if not steps:
        raise StateError(f"phase {phase.name!r} has nothing to report", got="no step by all ranks")
    timed = steps[1:] or steps
    # Ranks leave a step together, after its reduction: the slowest one's time is the step's.
    time_s = [max(record.step_s for record in records) for records in timed]
    tokens = sum(record.tokens for records in timed for record in records)
    rank_s = sum(record.step_s for records in timed for record in records)
    workers = {loader["worker"] for loader in phase.stats["loaders"]}
    samples = phase.audit["total"]["samples"]
    return Summary(
        num_steps=len(steps),
        loss_start=steps[0][0].loss,
        loss_end=steps[-1][0].loss,
        tokens_per_s=_ratio(tokens, sum(time_s)),
        step_s=fmean(time_s),
        planned_imbalance=fmean(records[0].planned_imbalance for records in timed),
        measured_imbalance=fmean(_imbalance(records) for records in timed),
        packing=phase.stats["packing"]["efficiency"],
        wait_share=_ratio(sum(r.wait_s for records in timed for r in records), rank_s),
        loader_bytes=sum(phase.stats["workers"][w]["memory_bytes"] for w in workers),
        num_workers=len(workers),
        audit={name: int(samples[name]) for name in AUDIT_COUNTS},
        num_pending=samples["planned"] - samples["delivered"] - samples["lost"],
    )


def rows(phases: Sequence[Phase]) -> list[tuple[str, ...]]:
    """Return the table: a line of headings, then a label and one figure a phase in every line."""
    summaries = [summarize(phase) for phase in phases]
    table: list[tuple[str, ...]] = [("", *(phase.name for phase in phases))]

    def add(label: str, figures: Sequence[str]) -> None:
        table.append((label, *figures))

    add("steps", [f"{s.num_steps}" for s in summaries])
    add("loss, first step", [f"{s.loss_start:.3f}" for s in summaries])
    add("loss, last step", [f"{s.loss_end:.3f}" for s in summaries])
    add("tokens/s", [f"{s.tokens_per_s:,.0f}" for s in summaries])
    add("step time, mean", [f"{s.step_s * 1e3:,.0f} ms" for s in summaries])
    add("imbalance planned, max/mean", [f"{s.planned_imbalance:.3f}" for s in summaries])
    add("imbalance measured, max/mean", [f"{s.measured_imbalance:.3f}" for s in summaries])
    add("packing, real/all tokens", [f"{s.packing:.3f}" for s in summaries])
    add("waiting for data", [f"{s.wait_share:.1%}" for s in summaries])
    add("loader memory", [f"{s.loader_bytes / 1e6:,.0f} MB" for s in summaries])
    for name in AUDIT_COUNTS:
        add(f"samples {name}", [f"{s.audit[name]:,}" for s in summaries])
    add("samples not due when it stopped", [f"{s.num_pending:,}" for s in summaries])
    return table


def render(table: Sequence[Sequence[str]]) -> str:
    """Return a table as plain text: labels to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in table
    ]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def verdict(phase: Phase, baseline: Phase) -> str:
    """Return lines that compare a phase with the one that it should beat."""
    new, old = summarize(phase), summarize(baseline)
    return (
        f"{phase.name}: the slowest rank computes {new.measured_imbalance:.2f} x the mean of the "
        f"ranks, against {old.measured_imbalance:.2f} x in {baseline.name}.\n"
        f"As steps wait for it, that alone would make them "
        f"{_ratio(old.measured_imbalance, new.measured_imbalance):.2f} x as fast.\nBy the clock "
        f"they are {_ratio(new.tokens_per_s, old.tokens_per_s):.2f} x as fast (tokens/s): that "
        f"has in it whatever else ran here meanwhile.\n"
        f"Both trained on the same samples in the same {len(_common_steps(phase, baseline))} "
        f"steps; losses of a step differ by at most {_loss_difference(phase, baseline):.0e}."
    )


def problems(phases: Sequence[Phase], *, loss_tolerance: float = 0.01) -> list[str]:
    """Return all that is wrong with the phases, in words; nothing if the demo held its promises.

    Parameters
    ----------
    phases
        Phases that read the same data in the same steps.
    loss_tolerance
        How far the losses of one step may lie apart: placement changes the order of additions.
    """
    found = []
    for phase in phases:
        counts = summarize(phase).audit
        found += [
            f"{phase.name}: {counts[name]:,} samples {name}"
            for name in ("repeated", "lost")
            if counts[name]
        ]
        if not phase.audit["ok"]:
            found.append(f"{phase.name}: the audit does not add up")
        if not all(isfinite(record.loss) for records in _steps(phase) for record in records):
            found.append(f"{phase.name}: a loss is not finite")
        made = {len(report.steps) for report in phase.ranks}
        if len(made) > 1:
            found.append(f"{phase.name}: ranks made unequal numbers of steps: {sorted(made)}")
        found += [
            f"{phase.name}: rank {report.rank} was stopped"
            for report in phase.ranks
            if report.ended == "signal"
        ]
    for phase in phases[1:]:
        found += [
            f"step {step} of {phases[0].name} and {phase.name} was drawn differently"
            for step in _common_steps(phases[0], phase)
            if _digests(phases[0])[step] != _digests(phase)[step]
        ]
        difference = _loss_difference(phases[0], phase)
        if not difference <= loss_tolerance:
            found.append(
                f"the losses of {phases[0].name} and {phase.name} differ by {difference:.3g} in a "
                f"step, although both train on the same samples"
            )
    return found


def _steps(phase: Phase) -> list[tuple[StepRecord, ...]]:
    """Return the records of all ranks for every step that all of them made."""
    return list(zip(*(report.steps for report in phase.ranks), strict=False))


def _digests(phase: Phase) -> dict[int, str]:
    """Return what identifies the samples of each step that the service still knows of."""
    return {step["step"]: step["draw_digest"] for step in phase.stats["steps"]}


def _common_steps(first: Phase, second: Phase) -> list[int]:
    """Return the steps that both phases made and know of."""
    made = {records[0].step for records in _steps(first)}
    made &= {records[0].step for records in _steps(second)}
    return sorted(made & _digests(first).keys() & _digests(second).keys())


def _imbalance(records: Sequence[StepRecord]) -> float:
    compute_s = [record.compute_cpu_s for record in records]
    return _ratio(max(compute_s), fmean(compute_s))


def _loss_difference(first: Phase, second: Phase) -> float:
    pairs = zip(_steps(first), _steps(second), strict=False)
    differences = [abs(one[0].loss - other[0].loss) for one, other in pairs]
    return nan if any(map(isnan, differences)) else max(differences, default=0.0)


def _ratio(value: float, by: float) -> float:
    return value / by if by else nan
