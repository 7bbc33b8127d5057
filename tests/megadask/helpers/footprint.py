"""What a process holds: objects that the collector knows, by type, and memory.

As a program it is a trainer: ``python -m tests.megadask.helpers.footprint ADDRESS NAME RANK`` makes
as many steps as each line on stdin says, and answers with what it holds then.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path


@dataclass(frozen=True)
class Held:
    """Objects by type, and bytes of proportional set size."""

    objects: dict[str, int]
    pss_bytes: int

    @property
    def num_objects(self) -> int:
        return sum(self.objects.values())

    def more_than(self, before: Held) -> dict[str, int]:
        """Return the types of which there are more now, and how many more."""
        now, then = Counter(self.objects), Counter(before.objects)
        return dict((now - then).most_common(8))


def held_here() -> Held:
    """Return what this process holds, after a collection."""
    for _ in range(3):  # what one collection frees may free more
        gc.collect()
    names = (f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pss_kb = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return Held(dict(Counter(names)), pss_kb * 1024)


def main() -> None:
    import megadask as md

    address, name, rank = sys.argv[1:]
    with md.connect(address, name, rank=int(rank), timeout=120) as loader:
        print("connected", flush=True)
        steps = loader.steps()
        for line in sys.stdin:
            for step in islice(steps, int(line)):
                for _ in step:
                    pass
            print("held", json.dumps(asdict(held_here())), flush=True)


if __name__ == "__main__":
    main()
