"""Who got which spans: an account of its own, by what the ranks say, beside the service's audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: (source, epoch, lane, position, start, stop)
Span = tuple[str, int, int, int, int, int]
#: (step, microbatch)
Mark = tuple[int, int]


@dataclass
class Account:
    """What every rank was given, by step and microbatch.

    A trainer that dies may have trained on batches that it could not acknowledge any more: its
    successor gets them again, and they must be the same. They are counted in ``retaken``.
    ``lost`` and ``repeated`` are the spans that `compare` found so.
    """

    retaken: int = 0
    lost: int = 0
    repeated: int = 0
    problems: list[str] = field(default_factory=list)
    _ranks: dict[int, int] = field(default_factory=dict)  # first step to the number of ranks then
    _given: dict[Mark, dict[int, tuple[Span, ...]]] = field(default_factory=dict)
    _last: dict[int, Mark] = field(default_factory=dict)  # by rank, of its present trainer
    _successors: set[int] = field(default_factory=set)  # ranks whose trainer died

    def begin(self, step: int, ranks: int) -> None:
        """From a step on there are so many ranks; what was given of it and behind is forgotten."""
        for known in [known for known in self._ranks if known >= step]:
            del self._ranks[known]
        self._ranks[step] = ranks
        self._given = {mark: given for mark, given in self._given.items() if mark < (step, 0)}
        self._last = {}
        self._successors = set()

    def succeed(self, rank: int) -> None:
        """The trainer of a rank died, and another one takes its place."""
        self._successors.add(rank)
        self._last.pop(rank, None)

    def note(self, rank: int, mark: Mark, spans: Sequence[Span]) -> None:
        """A rank was given a microbatch."""
        last = self._last.get(rank)
        if last is not None and mark not in ((last[0], last[1] + 1), (last[0] + 1, 0)):
            self.problems.append(f"rank {rank} was given {mark} after {last}")
        self._last[rank] = mark
        given = self._given.setdefault(mark, {})
        if rank not in given:
            given[rank] = tuple(spans)
        elif rank in self._successors:
            self.retaken += 1
            if given[rank] != tuple(spans):
                self.problems.append(f"rank {rank} was given another {mark} the second time")
        else:
            self.problems.append(f"rank {rank} was given {mark} twice")

    @property
    def num_steps(self) -> int:
        """Steps from the first one to the last."""
        return max(self._given, default=(-1, 0))[0] + 1

    @property
    def num_spans(self) -> int:
        """Spans that were given, each once."""
        return sum(len(spans) for given in self._given.values() for spans in given.values())

    def compare(self, expected: Mapping[int, Sequence[Span]]) -> list[str]:
        """Return what is wrong, given the spans of each step of a run without faults."""
        found = list(self.problems)
        counts: Counter[Span] = Counter()
        steps: dict[int, list[Span]] = {}
        for (step, microbatch), given in sorted(self._given.items()):
            ranks = self._ranks[max(first for first in self._ranks if first <= step)]
            if sorted(given) != list(range(ranks)):
                found.append(f"step {step}, microbatch {microbatch}: ranks {sorted(given)} alone")
            for spans in given.values():
                counts.update(spans)
                steps.setdefault(step, []).extend(spans)
        repeated = [span for span, count in counts.items() if count > 1]
        self.repeated = len(repeated)
        if repeated:
            found.append(f"{len(repeated)} spans came more than once, such as {repeated[0]}")
        for step, spans in sorted(expected.items()):
            lost = Counter(spans) - Counter(steps.get(step, []))
            self.lost += len(lost)
            strange = Counter(steps.get(step, [])) - Counter(spans)
            if lost or strange:
                found.append(f"step {step}: {len(lost)} spans are missing, {len(strange)} strange")
        if set(steps) != set(expected):
            found.append(f"{len(steps)} steps were given, {len(expected)} expected")
        return found
