"""A rank of a gloo job: ``python -m tests.megadask.helpers.member RANK WORLD STORE``.

Does what each line of its input says: JSON with address, service, groups (lists of ranks), body (a
function of this module), options of connect. All ranks make the groups; those of the job, below
``world``, run the body with theirs. Answers each line by one of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

import megadask as md
from tests.megadask.helpers.encoding import come_alone, exchange_gradients  # noqa: F401
from tests.megadask.helpers.seen import digest, spans_of

#: Arrays and tensors apart, `digest` sees all there is.
FACTS = ("step", "microbatch", "is_last", "num_loss_tokens", "num_loss_tokens_step")


def drain(job: dict[str, Any], group: Any) -> Any:
    """Take everything; return what each batch was, and the bytes fetched."""
    with connect(job, group) as loader:
        seen = [
            [digest(batch), sorted(batch), [batch[fact] for fact in FACTS], spans_of(batch)]
            for batch in loader
        ]
        return {"seen": seen, "stats": loader.stats()}


def mutate(job: dict[str, Any], group: Any) -> Any:
    """Take everything, overwriting each batch."""
    with connect(job, group) as loader:
        seen = []
        for batch in loader:
            seen.append(digest(batch))
            for value in batch.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-7)
        return {"seen": seen}


def leave_early(job: dict[str, Any], group: Any) -> Any:
    """Rank 0 takes two batches and no more; the others go on, and do not wait for long."""
    with connect(job, group) as loader:
        batches = iter(loader)
        taken = [next(batches)["microbatch"] for _ in range(2)]
        if dist.get_rank() > 0:
            assert loader._share is not None
            loader._share._timeout_s = 0.5  # of the group alone: fetching has all its time
            next(batches)
        return {"taken": taken}


def lose_rank(job: dict[str, Any], group: Any) -> Any:
    """Take everything, while another loader of the same process takes rank 0."""
    with connect(job, group) as loader, ExitStack() as stack:
        for number, _ in enumerate(loader):
            if number == 1 and loader.rank == 0:
                other = md.connect(job["address"], job["service"], rank=0, force=True)
                stack.enter_context(other)
    return {}


def only_connect(job: dict[str, Any], group: Any) -> Any:
    """Connect, and return what the loader shares."""
    with connect(job, group) as loader:
        return {"shares": loader._share is not None}


def save_and_load(job: dict[str, Any], group: Any) -> Any:
    """Save the loader by torch.distributed.checkpoint after three batches, and load it again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.stateful import Stateful

    with connect(job, None) as loader:
        assert isinstance(loader, Stateful)
        list(islice(loader, 3))
        weight = torch.full((2,), float(dist.get_rank()))
        where = {"checkpoint_id": job["folder"], "process_group": group}
        dcp.save({"loader": loader, "weight": weight}, **where)
        saved = loader.state_dict()
        after = [digest(batch) for batch in islice(loader, 6)]
        dcp.load({"loader": loader, "weight": weight}, **where)
        assert loader.state_dict() == saved
        again = [digest(batch) for batch in islice(loader, 6)]
        return {"after": after, "again": again, "mark": [saved["step"], saved["microbatch"]]}


def connect(job: dict[str, Any], group: Any) -> md.Loader:
    options = {"timeout": 30.0, **job.get("options", {})}
    # Where the mesh has as many ranks as torch.distributed, the rank is that of this.
    rank = None if dist.get_world_size() == job["world"] else dist.get_rank()
    return md.connect(job["address"], job["service"], rank=rank, group=group, **options)


def do(job: dict[str, Any], rank: int) -> Any:
    group = None
    for ranks in job["groups"]:
        made = dist.new_group(ranks)
        if rank in ranks:
            group = made
    if rank >= job["world"]:
        return None
    body: Callable[[dict[str, Any], Any], Any] = globals()[job["body"]]
    try:
        return body(job, group)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        return {"error": type(error).__name__, "message": str(error), "notes": notes}


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    print("ready", flush=True)
    for line in sys.stdin:
        print("result", json.dumps(do(json.loads(line), rank)), flush=True)


if __name__ == "__main__":
    main()
