"""Multisource data loading for training large foundation models, on Dask.

Names are loaded when they are first used: ``import megadask`` loads neither Dask nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megadask import errors, readers, transforms
    from megadask.checkpoints import state_at
    from megadask.indexing.index import index
    from megadask.looking.look import look
    from megadask.looking.looks import Look
    from megadask.pipeline import Pipeline
    from megadask.planner import costs, lengths
    from megadask.planner.batching import Fixed, Packed, Padded
    from megadask.planner.graph import DGraph
    from megadask.planner.ids import SampleId
    from megadask.planner.schedule import Schedule
    from megadask.planner.simulating import simulate
    from megadask.planner.stream import Stream
    from megadask.planner.topology import ClientPlaceTree
    from megadask.resuming.report import ResumeReport
    from megadask.resuming.verify import verify_resume
    from megadask.scheduling.spec import Limits
    from megadask.service import Service, serve
    from megadask.source import Source
    from megadask.trainer.encoders import (
        exchange,
        exchange_step,
        items_or_placeholder,
        scatter_embeddings,
    )
    from megadask.trainer.loader import Loader, connect
    from megadask.trainer.presets import model_inputs

    __version__: str

__all__ = [
    "ClientPlaceTree",
    "DGraph",
    "Fixed",
    "Limits",
    "Loader",
    "Look",
    "Packed",
    "Padded",
    "Pipeline",
    "ResumeReport",
    "SampleId",
    "Schedule",
    "Service",
    "Source",
    "Stream",
    "__version__",
    "connect",
    "costs",
    "errors",
    "exchange",
    "exchange_step",
    "index",
    "items_or_placeholder",
    "lengths",
    "look",
    "model_inputs",
    "readers",
    "scatter_embeddings",
    "serve",
    "simulate",
    "state_at",
    "transforms",
    "verify_resume",
]

#: Where each exported name lives, as ``module`` or ``module:name``.
_HOMES = {
    "ClientPlaceTree": "megadask.planner.topology:ClientPlaceTree",
    "DGraph": "megadask.planner.graph:DGraph",
    "Fixed": "megadask.planner.batching:Fixed",
    "Limits": "megadask.scheduling.spec:Limits",
    "Loader": "megadask.trainer.loader:Loader",
    "Look": "megadask.looking.looks:Look",
    "Packed": "megadask.planner.batching:Packed",
    "Padded": "megadask.planner.batching:Padded",
    "Pipeline": "megadask.pipeline:Pipeline",
    "ResumeReport": "megadask.resuming.report:ResumeReport",
    "SampleId": "megadask.planner.ids:SampleId",
    "Schedule": "megadask.planner.schedule:Schedule",
    "Service": "megadask.service:Service",
    "Source": "megadask.source:Source",
    "Stream": "megadask.planner.stream:Stream",
    "connect": "megadask.trainer.loader:connect",
    "costs": "megadask.planner.costs",
    "errors": "megadask.errors",
    "exchange": "megadask.trainer.encoders:exchange",
    "exchange_step": "megadask.trainer.encoders:exchange_step",
    "items_or_placeholder": "megadask.trainer.encoders:items_or_placeholder",
    "index": "megadask.indexing.index:index",
    "lengths": "megadask.planner.lengths",
    "look": "megadask.looking.look:look",
    "model_inputs": "megadask.trainer.presets:model_inputs",
    "readers": "megadask.readers",
    "scatter_embeddings": "megadask.trainer.encoders:scatter_embeddings",
    "serve": "megadask.service:serve",
    "simulate": "megadask.planner.simulating:simulate",
    "state_at": "megadask.checkpoints:state_at",
    "transforms": "megadask.transforms",
    "verify_resume": "megadask.resuming.verify:verify_resume",
}


def _version() -> str:
    """Return the installed version, which setup.cfg alone states."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("megadask")
    except PackageNotFoundError:  # a checkout on sys.path that nobody installed
        return "0+unknown"


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value = _version()
        elif name in _HOMES:
            module_name, _, attribute = _HOMES[name].partition(":")
            module = import_module(module_name)
            value = getattr(module, attribute) if attribute else module
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted(__all__)
