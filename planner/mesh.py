"""What batching and strategy ask of the mesh of the trainers."""

from __future__ import annotations

from megadask.planner.batching import Packed
from megadask.planner.errors import ConfigError
from megadask.planner.graph import Strategy
from megadask.planner.topology import ClientPlaceTree


def check_mesh(topology: ClientPlaceTree, strategy: Strategy, batching: Packed) -> None:
    """Raise ConfigError if packed steps cannot be dealt out to the buckets as declared."""
    if topology.cp > 1:
        multiple = 2 * topology.cp
        if batching.pad_to_multiple % multiple:
            raise ConfigError(
                "Packed(pad_to_multiple=) under context parallelism",
                got=batching.pad_to_multiple,
                limit=f"a multiple of 2 x cp = {multiple}",
                remedy="It is part of the draw, so it is not adapted by itself.",
            )
    num_buckets = topology.num_buckets(strategy.axis)
    slots = num_buckets * batching.micro_batch
    if isinstance(batching.global_batch, int) and batching.global_batch % slots:
        raise ConfigError(
            "Packed(global_batch=)",
            got=batching.global_batch,
            limit=f"a multiple of {slots}: {strategy.axis} has {num_buckets} buckets of "
            f"micro_batch={batching.micro_batch}",
        )
    if strategy.microbatches is not None:
        raise ConfigError(
            "distribute(microbatches=) of packed steps",
            got=strategy.microbatches,
            remedy="Packed(global_batch=, micro_batch=) says how many microbatches there are.",
        )
