"""Resume from saved states in a process of its own, on a cluster of its own.

Reads jobs from the JSON file of the first argument, writes the spans of every step to the second.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from distributed import Client

import megadask as md
from tests.conftest import make_cluster
from tests.megadask.helpers.data import corpus, pipeline
from tests.megadask.helpers.ranks import run
from tests.megadask.helpers.seen import drain, spans_by_step

DATA = corpus({"a": 60, "b": 45, "c": 20}, longest=300)


def make(dp: int = 2, loaders: int = 1, shadows: int = 0, **options: Any) -> md.Pipeline:
    """Return the pipeline that the states belong to, for any number of ranks and loaders."""
    options = {"epochs": 2, "topology": md.ClientPlaceTree(dp=dp), **options}
    return pipeline(DATA, sources={"loaders": loaders, "shadows": shadows}, **options)


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    done = []
    with (
        make_cluster(processes=False) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        for job in jobs:
            made = make(job["dp"], job["loaders"])
            with md.serve(made, client, resume=job["state"]) as service:
                ranks = run(service, drain)
                audit = service.audit()
            done.append({"steps": spans_by_step(ranks), "ok": audit["ok"]})
    Path(sys.argv[2]).write_text(json.dumps(done))


if __name__ == "__main__":
    main()
