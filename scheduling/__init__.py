"""Runs loaders, planner, constructors and supervisor on a Dask cluster.

Uses dask.distributed and the planner; never torch, which loaders and constructors do without.
"""

if __name__ != "megadask.scheduling":
    raise ImportError(
        f"{__name__!r} is part of the MegaDask checkout, which is on sys.path: "
        "import megadask.scheduling instead"
    )

__all__: list[str] = []
