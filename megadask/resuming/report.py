"""What `megadask.verify_resume` found: interrupted runs, beside one that was not interrupted.

A reading holds what ranks got of a run, in a form that does not depend on where it was placed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: (source, epoch, lane, position)
Ident = tuple[str, int, int, int]
#: A sample and the part of it: [start, stop).
Span = tuple[Ident, int, int]
#: Steps that are read behind the last place where a run is stopped.
MORE_STEPS = 2
#: So many different problems are printed.
MOST_PROBLEMS = 3

#: The next microbatch: (step, microbatch).
Mark = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One microbatch as one rank got it.

    Attributes
    ----------
    spans
        What is in it.
    contents
        A hash of the tokens of each span; empty where tokens are cut, collated, or not there.
    digest
        A hash of all its tensors.
    """

    bucket: int
    step: int
    microbatch: int
    is_last: bool
    spans: tuple[Span, ...]
    contents: tuple[str, ...]
    digest: str

    @property
    def next(self) -> Mark:
        """The microbatch behind it."""
        return (self.step + 1, 0) if self.is_last else (self.step, self.microbatch + 1)

    @classmethod
    def of(cls, batch: Mapping[str, Any], bucket: int) -> Taken:
        """Return what is compared of a batch."""
        bounds = np.asarray(batch["spans"]).tolist()
        idents = [(i.source, i.epoch, i.lane, i.position) for i in batch["sample_ids"]]
        spans = tuple((i, *bound) for i, bound in zip(idents, bounds, strict=True))
        return cls(
            bucket=bucket,
            step=int(batch["step"]),
            microbatch=int(batch["microbatch"]),
            is_last=bool(batch["is_last"]),
            spans=spans,
            contents=tuple(_contents(batch)) if _has_whole_tokens(batch, len(spans)) else (),
            digest=_digest(batch),
        )


@dataclass(frozen=True)
class Reading:
    """What all ranks got of a part of a run, rank after rank."""

    ranks: tuple[tuple[Taken, ...], ...]

    def steps(self) -> dict[int, list[Span]]:
        """Return the spans of every step, sorted; what ranks share counts once."""
        found: dict[int, dict[tuple[int, int], tuple[Span, ...]]] = {}
        for taken in self._all():
            parts = found.setdefault(taken.step, {})
            place = (taken.bucket, taken.microbatch)
            parts[place] = max(parts.get(place, ()), taken.spans, key=len)
        return {
            step: sorted(span for spans in parts.values() for span in spans)
            for step, parts in sorted(found.items())
        }

    def digests(self) -> dict[tuple[int, int, int], str]:
        """Return the digest of every microbatch, by (rank, step, microbatch)."""
        return {
            (rank, taken.step, taken.microbatch): taken.digest
            for rank, mine in enumerate(self.ranks)
            for taken in mine
        }

    def samples(self) -> dict[Ident, dict[tuple[int, int], str]]:
        """Return the parts of every sample, and a hash of each where that is known."""
        found: dict[Ident, dict[tuple[int, int], str]] = {}
        for taken in self._all():
            contents = taken.contents or ("",) * len(taken.spans)
            for (ident, start, stop), content in zip(taken.spans, contents, strict=True):
                parts = found.setdefault(ident, {})
                parts[start, stop] = content or parts.get((start, stop), "")
        return found

    def marks(self) -> list[Mark]:
        """Return the places behind every microbatch, in order."""
        return sorted({taken.next for taken in self._all()})

    def _all(self) -> Iterator[Taken]:
        return (taken for mine in self.ranks for taken in mine)


def differing_sources(whole: Reading, other: Reading) -> dict[str, str]:
    """Return the sources of which a sample was read otherwise, each with the first such sample."""
    found: dict[str, str] = {}
    was = whole.samples()
    for ident, parts in sorted(other.samples().items()):
        if ident[0] in found or ident not in was:
            continue
        # A run that ends early has fewer parts of a sample, not others.
        for part, content in parts.items():
            known = was[ident].get(part)
            reaches = max(stop for _, stop in was[ident])
            if known != content and (known is not None or part[0] < reaches):
                source, epoch, lane, position = ident
                found[source] = f"epoch {epoch}, lane {lane}, position {position}"
                break
    return found


@dataclass(frozen=True, kw_only=True)
class ResumeCase:
    """One run that was stopped, and taken up on another cluster.

    Attributes
    ----------
    stop
        Where it was stopped.
    mark
        (step, microbatch) of what came next there.
    topology
        Of the ranks that took it up.
    loaders, constructors
        Of the service that they had.
    num_steps
        Steps whose samples were compared.
    num_digests
        Microbatches whose tensors were compared: all, where the topology is the same.
    problem
        What was wrong; empty where nothing was.
    """

    stop: str
    mark: Mark
    topology: str
    loaders: int
    constructors: int
    num_steps: int = 0
    num_digests: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ResumeReport:
    """Whether a pipeline resumes exactly. Prints as a table.

    Attributes
    ----------
    num_steps
        Steps of the run that was not disturbed.
    ended
        Whether the data ended there.
    cases
        The runs that were.
    unsteady
        Sources whose samples were not the same each time they were read, and the first of them.
    notes
        What could not be tried, and why.
    """

    num_steps: int
    ended: bool
    cases: Sequence[ResumeCase]
    unsteady: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether every run that was stopped went on as the one that was not."""
        return not self.unsteady and not any(case.problem for case in self.cases)

    def __str__(self) -> str:
        rows = [("stopped", "before", "taken up by", "loaders", "constructors", "compared", "")]
        for case in self.cases:
            compared = f"{case.num_steps} steps"
            if case.num_digests:
                compared += f", {case.num_digests} digests"
            rows.append(
                (
                    case.stop,
                    f"step {case.mark[0]}, microbatch {case.mark[1]}",
                    case.topology,
                    str(case.loaders),
                    str(case.constructors),
                    compared,
                    "differs" if case.problem else "same",
                )
            )
        widths = [max(len(row[n]) for row in rows) for n in range(7)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines.insert(1, "-" * max(map(len, lines)))
        lines += self._says()
        return "\n".join(lines)

    def _says(self) -> Iterator[str]:
        for source, sample in self.unsteady.items():
            yield (
                f"source {source!r} does not read the same twice, first at {sample}: its transform "
                "(or its reader) depends on something else than the record and its generator rng"
            )
        problems = list(dict.fromkeys(case.problem for case in self.cases if case.problem))
        yield from (f"problem: {problem}" for problem in problems[:MOST_PROBLEMS])
        if len(problems) > MOST_PROBLEMS:
            yield f"and {len(problems) - MOST_PROBLEMS} more problems"
        yield from (f"note: {note}" for note in self.notes)
        end = "to the end of the data" if self.ended else f"({MORE_STEPS} behind the last stop)"
        of = f"{self.num_steps} steps {end}"
        verdict = "resumes exactly" if self.ok else "does NOT resume exactly"
        yield f"{verdict}: {len(self.cases)} runs beside an undisturbed one of {of}"


def join(parts: Iterable[Mapping[int, list[Span]]]) -> dict[int, list[Span]]:
    """Return the spans by step of parts of a run."""
    found: dict[int, list[Span]] = {}
    for part in parts:
        for step, spans in part.items():
            found.setdefault(step, []).extend(spans)
    return {step: sorted(spans) for step, spans in sorted(found.items())}


def _arrays(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a batch as arrays, by name."""
    return {
        name: np.ascontiguousarray(value.numpy())
        for name, value in sorted(batch.items())
        if hasattr(value, "numpy")
    }


def _digest(batch: Mapping[str, Any]) -> str:
    made = hashlib.blake2b(digest_size=16)
    for name, array in _arrays(batch).items():
        made.update(f"{name} {array.dtype} {array.shape}".encode())
        made.update(array.tobytes())
    return made.hexdigest()


def _has_whole_tokens(batch: Mapping[str, Any], num_spans: int) -> bool:
    names = ("tokens", "cu_seqlens", "cu_seqlens_padded")
    if not all(hasattr(batch.get(name), "shape") for name in names):
        return False
    tokens, real, padded = (batch[name] for name in names)
    if tokens.ndim != 2 or real.ndim != 2 or real.shape != padded.shape:
        return False
    if len(tokens) != len(real) or int(padded.max()) > tokens.shape[1]:
        return False  # cut for context parallelism, or collated
    return int((np.diff(real.numpy(), axis=1) > 0).sum()) == num_spans


def _contents(batch: Mapping[str, Any]) -> Iterator[str]:
    """Yield a hash of the tokens and the loss mask of every span, in the order of the spans."""
    names = ("tokens", "cu_seqlens", "cu_seqlens_padded")
    tokens, real, padded = (batch[name].numpy() for name in names)
    for pack in range(len(tokens)):
        for first, length in zip(padded[pack, :-1], np.diff(real[pack]), strict=True):
            if length:
                part = np.ascontiguousarray(tokens[pack, first : first + length])
                yield hashlib.blake2b(part.tobytes(), digest_size=8).hexdigest()
