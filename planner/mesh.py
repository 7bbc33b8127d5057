"""What batching and strategy ask of the mesh of the trainers."""

from __future__ import annotations

from collections.abc import Collection

from megadask.planner.batching import Batching, Padded
from megadask.planner.errors import ConfigError
from megadask.planner.strategy import Strategy
from megadask.planner.topology import ClientPlaceTree


def check_mesh(
    topology: ClientPlaceTree, strategy: Strategy, batching: Batching, modalities: Collection[str]
) -> None:
    """Raise ConfigError if packed steps cannot be dealt out to the buckets as declared.

    modalities: those that the sources report.
    """
    _check_slices(topology, strategy, batching)
    num_buckets = topology.num_buckets(strategy.axis)
    slots = num_buckets * batching.micro_batch
    if isinstance(batching.global_batch, int) and batching.global_batch % slots:
        raise ConfigError(
            batching.says("global_batch"),
            got=batching.global_batch,
            limit=f"a multiple of {slots}: {strategy.axis} has {num_buckets} buckets of "
            f"micro_batch={batching.micro_batch}",
        )
    unknown = sorted(set(strategy.selections) - set(modalities))
    if unknown:
        raise ConfigError(
            "select(modality) of a modality that no source reports",
            got=unknown,
            limit=f"one of {sorted(modalities)}",
            remedy="Name it in Source(modalities=).",
        )
    kind = type(batching).__name__
    for word, value in (
        ("distribute(microbatches=)", strategy.microbatches),
        ("balance(max_tokens=)", strategy.max_tokens),
    ):
        if value is not None:
            raise ConfigError(
                f"{word} of {kind} steps",
                got=value,
                limit="nothing",
                remedy=f"{kind}(seq_len=, global_batch=, micro_batch=) says how many there are.",
            )
    if strategy.equal_counts and batching.documents_limit > 1:
        raise ConfigError(
            f"balance(equal_counts=) of {kind} steps",
            got=True,
            limit="False or nothing",
            remedy="Packs hold as many documents as fit; rows of Padded(...) can be counted.",
        )


def _check_slices(topology: ClientPlaceTree, strategy: Strategy, batching: Batching) -> None:
    """Check that what the layout cuts, documents or packs, can be cut for the ranks."""
    multiple = 2 * topology.num_slices(strategy.axis)
    layout = strategy.context.layout
    is_fixed = not isinstance(batching, Padded) or batching.pad_to == "seq_len"
    name = "seq_len" if layout == "sequence" and is_fixed else "pad_to_multiple"
    if multiple > 2 and getattr(batching, name) % multiple:
        raise ConfigError(
            f"{batching.says(name)} under context parallelism by {layout!r}",
            got=getattr(batching, name),
            limit=f"a multiple of 2 x cp = {multiple}",
            remedy="It is part of the draw, so it is not adapted by itself.",
        )
