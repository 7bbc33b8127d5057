"""Decides what every training step consists of and where it goes, from metadata alone.

Pure: numpy, scipy and pyarrow, but no Dask, no IO, no clock and no global state. Names are loaded
when they are first used.

Declaring
  graph.py, recorder.py  the primitives; strategy.py, what they record
  topology.py            the mesh of the trainers; meshtree.py shows it, mesh.py checks it
  schedule.py            values by step; weights.py, shares of sources
  batching.py            how samples become batches; fields.py, what lies beside their tokens
  costs.py, measured.py  what a span costs, by formula or fitted to times (fitview.py shows the fit)
  lengths.py             laws of lengths to try things on

Drawing: what a step consists of
  draw.py                one step by its rules.py; window.py, lines.py, ahead.py and supply.py give
                         it spans
  mixture.py             whose turn it is; deferral.py, what waits; drift.py, what that changes
  packing.py             proves that the spans fit; pouring.py cuts them where packs end
  behind.py              the state behind a step; state.py, deltas.py
  onward.py              where a run goes on when its sources have ended

Placing: where it goes
  place.py               the spans of a drawn step; cp.py, slices; routing.py, items of a modality
  problem.py, bound.py   the balancing problem, and how good a solution can be
  balance.py             the methods: placing.py, dealing.py, fitting.py (cheap ones),
                         differencing.py (Karmarkar-Karp), assignment.py with refine.py, swaps.py
                         and microbatches.py
  hybrid.py              long documents over several context-parallel ranks

Plans
  plan.py, tableplan.py  of a drawn step, of a table; views.py, plots.py, lineage.py look at them
  simulation.py          a step on an idealised trainer; pipelining.py, stream.py, simulating.py,
                         stream_report.py, streams of steps

Records
  ids.py, metadata.py    samples and their columns; columnar.py, digests.py, names.py
  sequences.py           samples of several sequences; tables.py, tables of the user
  checks.py, errors.py   what options may be
  ledger.py, runs.py     the audit
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if __name__ != "megadask.planner":
    raise ImportError(
        f"{__name__!r} is part of the MegaDask checkout, which is on sys.path: "
        "import megadask.planner instead"
    )

if TYPE_CHECKING:
    from megadask.planner import costs, errors, lengths
    from megadask.planner.batching import Fixed, Packed, Padded
    from megadask.planner.graph import DGraph
    from megadask.planner.ids import SampleId, Verdict
    from megadask.planner.metadata import Metadata
    from megadask.planner.schedule import Schedule
    from megadask.planner.simulating import simulate
    from megadask.planner.stream import Stream
    from megadask.planner.topology import ClientPlaceTree

__all__ = [
    "ClientPlaceTree",
    "DGraph",
    "Fixed",
    "Metadata",
    "Packed",
    "Padded",
    "SampleId",
    "Schedule",
    "Stream",
    "Verdict",
    "costs",
    "errors",
    "lengths",
    "simulate",
]

#: Where each exported name lives; a name that is missing here is a submodule.
_HOMES = {
    "ClientPlaceTree": "topology",
    "DGraph": "graph",
    "Fixed": "batching",
    "Metadata": "metadata",
    "Packed": "batching",
    "Padded": "batching",
    "SampleId": "ids",
    "Schedule": "schedule",
    "Stream": "stream",
    "Verdict": "ids",
    "simulate": "simulating",
}

if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"{__name__}.{_HOMES.get(name, name)}")
        value = getattr(module, name) if name in _HOMES else module
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
