"""How many microbatches a trainer keeps on their way. Only decides."""

from __future__ import annotations

#: What the microbatches on their way may take together, where the number adapts.
MOST_BYTES = 256 * 2**20
#: As many there are at most.
MOST = 16


class Prefetch:
    """A number of microbatches that grows for as long as it helps.

    It begins with one, until the first microbatch has come; then one is used while another one is
    on its way. Where the trainer has to wait although the service had built ahead, what it waits
    for is the way itself, and one more is kept on it. A trainer that is slower than that never
    waits, and a service that is slower cannot be helped by asking earlier.

    Parameters
    ----------
    fixed
        The number, if it is not to adapt.

    Attributes
    ----------
    count
        The number.
    is_late
        Whether the last microbatch was waited for.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._adapts = fixed is None
        self.count = fixed or 1
        self.is_late = True

    def note(self, *, waited: bool, was_built: bool, num_bytes: int) -> None:
        """Take note of a microbatch that came.

        Parameters
        ----------
        waited
            Whether it was not there yet when the trainer wanted it.
        was_built
            Whether the service had it ready when it was asked for.
        num_bytes
            Its size.
        """
        self.is_late = waited
        if not self._adapts:
            return
        wanted = max(self.count, 2) + (waited and was_built and self.count > 1)
        self.count = max(2, min(wanted, MOST, MOST_BYTES // max(1, num_bytes)))
