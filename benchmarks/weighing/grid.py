"""All cells of one layout of the files, small ones first; what does not fit is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import reporting
from weighing.cells import WORKERS, Bench, Cell
from weighing.processes import SPARED_MB, TooLargeError, free_mb

#: What a cell may take, however much is free, and what must be left over beside it.
LARGEST_MB = 18_000.0
MARGIN_MB = 1000.0
#: DataLoaders, by how their workers read, and the MB that an open source takes in one at least; how
#: many really is measured by the smaller cells.
WAYS = {"lean": 1.0, "default": 30.0}

#: Sources and ranks.
At = tuple[int, int]


def fitted(cells: Mapping[At, float]) -> tuple[float, float]:
    """Return MB a worker and MB a source and worker, as (sources, ranks) to MB say."""
    rows = [(ranks * WORKERS, ranks * WORKERS * sources) for sources, ranks in cells]
    found, *_ = np.linalg.lstsq(np.array(rows, float), np.array(list(cells.values())), rcond=None)
    return float(found[0]), float(found[1])


class Grid:
    """Cells by what was measured: MB of each time that they were weighed.

    sources, ranks: how many of each, in all combinations. bare: ranks to MB of those that load
    nothing. lanes: of each source.
    """

    def __init__(
        self,
        bench: Bench,
        sources: Sequence[int],
        ranks: Sequence[int],
        bare: Mapping[int, float],
        lanes: int,
    ) -> None:
        self._bench, self.sources, self.ranks, self.bare = bench, sources, ranks, bare
        self._lanes = lanes
        #: Variant to (sources, ranks) to MB, bare ranks included.
        self.loading: dict[str, dict[At, list[float]]] = {"default": {}, "lean": {}, "MegaDask": {}}
        self.server: dict[At, list[float]] = {}
        self.floor: dict[int, list[float]] = {}
        #: Lanes to MB of the cluster, with the fewest sources and ranks.
        self.lanes: dict[int, list[float]] = {}

    def measure(self) -> None:
        """Measure everything that fits."""
        for sources in self.sources:
            self.floor[sources] = self._bench.reader(sources)
            reporting.progress(f"{sources} sources: one copy {np.median(self.floor[sources]):,.0f}")
            for ranks in self.ranks:
                at = (sources, ranks)
                cell = self._bench.megadask(*at, self._lanes)
                self.server[at] = cell.server_mb
                self._keep("MegaDask", at, cell)
                if not self.lanes:
                    self.lanes[self._lanes] = cell.server_mb
                for way in WAYS:
                    if self._expected_mb(way, at) > min(LARGEST_MB, free_mb() - SPARED_MB):
                        reporting.progress(f"{at}: {way} does not fit")
                        continue
                    try:
                        self._keep(way, at, self._bench.ranks("torch", *at, way))
                    except TooLargeError:
                        reporting.progress(f"{at}: {way} did not fit")

    def compare(self, lanes: int) -> None:
        """Measure the fewest sources and ranks with other lanes, too."""
        few = self._bench.megadask(min(self.sources), min(self.ranks), lanes)
        self.lanes[lanes] = few.server_mb

    def net(self, variant: str) -> dict[At, float]:
        """Return (sources, ranks) to MB, bare ranks subtracted."""
        cells = self.loading[variant]
        return {at: float(np.median(mb)) - self.bare[at[1]] for at, mb in cells.items()}

    def figures(self) -> dict[str, Any]:
        """Return everything for the record of the report."""
        return {
            "floor": self.floor,
            "lanes": self.lanes,
            "server": [[*at, mb] for at, mb in self.server.items()],
            "loading": {
                variant: [[*at, mb] for at, mb in cells.items()]
                for variant, cells in self.loading.items()
            },
        }

    def _keep(self, variant: str, at: At, cell: Cell) -> None:
        self.loading[variant][at] = cell.total_mb
        reporting.progress(f"{at}: {variant} {np.median(cell.total_mb):,.0f} MB with ranks")

    def _expected_mb(self, way: str, at: At) -> float:
        """Return what a cell will take, going by those measured; before those, by none."""
        known = self.net(way)
        if len({sources for sources, _ in known}) < 2:
            each = (mb / (s * r * WORKERS) for (s, r), mb in known.items())
            per_source = max(each, default=WAYS[way])
            expected = per_source * at[0] * at[1] * WORKERS
        else:
            worker, source = fitted(known)
            expected = (worker + source * at[0]) * at[1] * WORKERS
        return self.bare[at[1]] + expected + MARGIN_MB
