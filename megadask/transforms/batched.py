"""Transforms that take several records at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megadask.fingerprints.fingerprint import fingerprint
from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError
from megadask.transforms.transform import Record, Results, Sample


class Batched:
    """A transform that is faster for several records at once.

    What it makes of a record must not depend on the others that it is given with.

    Parameters
    ----------
    function
        From a list of records to a list with, for each, its sample, None to drop it, or an
        Exception that it fails with. Where it raises, the records are tried one by one.
    size
        Most records at a time; fewer where these have more than 4 MB of texts and bytes.
    """

    #: Whoever asks for several at once gains by it, so texts are bounded less than elsewhere.
    batch_bytes = 4 * 2**20

    def __init__(self, function: Callable[[Sequence[Record]], Results], size: int = 64) -> None:
        if not callable(function):
            raise ConfigError("Batched(function)", got=repr(function), limit="a function")
        check_integer("Batched(size=)", size, 1)
        self.function = function
        self.batch_records = size

    def __call__(self, record: Record) -> Sample | None:
        """Return what becomes of one record."""
        results = self.function([record])
        if not isinstance(results, list) or len(results) != 1:
            raise ConfigError(
                f"the function of {self!r}", got=repr(results)[:80], limit="a list of one, for one"
            )
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]

    def batch(self, records: Sequence[Record]) -> Results:
        """Return what each of some records becomes, or fails with."""
        return self.function(records)

    def fingerprint(self) -> str:
        """Return a text that differs where results would; how many at a time changes nothing."""
        return f"Batched({fingerprint(self.function)})"

    def __repr__(self) -> str:
        return f"Batched({getattr(self.function, '__qualname__', self.function)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batched):
            return NotImplemented
        return (self.function, self.batch_records) == (other.function, other.batch_records)

    def __hash__(self) -> int:
        return hash((self.function, self.batch_records))
