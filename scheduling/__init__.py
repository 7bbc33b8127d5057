"""Runs loaders, planner, constructors and supervisor on a Dask cluster.

Uses dask.distributed and the planner; never torch, which loaders and constructors do without.

Reading: inside a loader, no Dask
  source_loader.py       metadata of records, samples by id; cache.py, forward.py
  lanes.py               records in order, with verdicts (policy.py); shuffle.py, batched.py
  samples.py             the checked form of a sample, sample_items.py, conversion.py; extras.py,
                         fillers.py, serving.py
  known.py               what is known of a record before it is read
  reading.py             what loaders and readers agree on

Batches: inside a constructor
  constructor_actor.py   builds the batches of some buckets; shelf.py buffers, reach.py holds back,
                         heard.py knows what is acknowledged
  gather.py              payload from the loaders; item_delivery.py, items.py, item_payload.py
  building.py            from payload to what ranks get: assemble.py, collate.py, stages.py
  handing.py             hands out each share.py; delivery.py, how a trainer is answered
  ring.py                shared memory for trainers of the same host: slots.py decides, segment.py

Planning
  planner_actor.py       draws, places and commits each step; feed.py, metadata of a source
  mirror.py              keeps standbys of loaders warm

The committed record: inside the scheduler
  supervisor.py          the scheduler plugin; calls.py, what roles and trainers may ask
  run.py, record.py      one running pipeline: claims.py, agreement.py, passes.py, delivered.py,
                         history.py, point.py, marks.py, roster.py; bulletin.py, news for
                         constructors; portions.py, their parts of a plan
  custody.py, roles.py   who holds which role (life.py), decided by splitting.py; watch.py and
                         silence.py, workers that hang; retiring.py, workers that leave;
                         autosize.py and sizing.py, loaders as the mixture needs them
  resharding.py, hold.py another topology
  checkpoint.py          the record on storage: journal.py, kept.py, retention.py

Between them
  spec.py                what travels when a pipeline starts
  process.py             what was opened in one process is of no use in its forks
  wire.py, owners.py     calls with deadlines, to loaders that may be replaced, or be slow
                         (hedging.py)
  loader_host.py         the worker plugin that hosts loaders; quiet.py, what Dask need not log
  trainer_link.py        the trainer's end: desk.py, line.py, track.py, turning.py,
                         prefetch.py; receiver.py maps shared memory; courier.py, a thread that
                         takes work off the trainer's
  errors.py
"""

if __name__ != "megadask.scheduling":
    raise ImportError(
        f"{__name__!r} is part of the MegaDask checkout, which is on sys.path: "
        "import megadask.scheduling instead"
    )

__all__: list[str] = []
