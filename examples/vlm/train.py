"""Train a small vision-language model on two ranks, their encoder work balanced by MegaDask.

``python examples/vlm/train.py`` writes the data, starts a Dask cluster on this machine and two
ranks that meet over gloo, and prints a table. Needs megadask[torch,images] and scikit-image.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import photos
from distributed import Client
from model import IMAGE, MERGE, PATCH, WIDTH

import megadask as md
from megadask.demo.cluster import local_cluster
from megadask.demo.progress import Display
from megadask.demo.trainers import TrainerError, Trainers

NUM_RANKS = 2


def pipeline(sources: Mapping[str, str]) -> md.Pipeline:
    """Return what feeds the ranks. sources: source to the glob of its files."""
    see = md.transforms.Chain(
        md.transforms.DecodeImage("image", patch=PATCH, max_patches=256, merge=MERGE),
        md.transforms.Placeholders("image", IMAGE, md.transforms.Bytes(), merge=MERGE),
    )

    def strategy(graph: md.DGraph) -> None:
        graph.mix({"photos": 0.8, "docs": 0.2})
        graph.distribute("dp").cost(md.costs.Transformer(hidden=64, layers=2))
        # Whose microbatch an image belongs to does not say who encodes it.
        encoder = graph.select("image", encode="microbatch").distribute("world")
        encoder.cost(md.costs.VisionEncoder("image", hidden=WIDTH, layers=1)).balance("assignment")

    return md.Pipeline(
        sources=[
            md.Source("photos", md.readers.Parquet(sources["photos"]), see, modalities=("image",)),
            md.Source("docs", md.readers.Parquet(sources["docs"]), md.transforms.Bytes()),
        ],
        topology=md.ClientPlaceTree(dp=NUM_RANKS),
        strategy=strategy,
        batching=md.Packed(seq_len=512, global_batch=8, micro_batch=2, overflow="truncate"),
    )


def run(num_steps: int, num_photos: int) -> int:
    """Write the data, serve it and train; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="megadask-vlm-") as name:
        folder = Path(name)
        declared = pipeline(photos.write(folder / "data", num_photos))
        program = (sys.executable, str(Path(__file__).with_name("rank.py")))
        with (
            local_cluster(2, folder) as cluster,
            Client(cluster, set_as_default=False) as client,
            md.serve(declared, client) as service,
        ):
            arguments = ["--address", service.address, "--steps", str(num_steps)]
            trainers = Trainers(NUM_RANKS, arguments, folder, program=program)
            events: list[Mapping[str, Any]] = []
            with trainers, Display().phase("training", num_steps) as show:
                for event in trainers.events():
                    show(event)
                    events.append(event)
            audit = service.audit()["total"]["samples"]
    steps = [event for event in events if event["event"] == "step"]
    print(table(steps))
    print(
        "samples", ", ".join(f"{word} {audit[word]}" for word in ("delivered", "repeated", "lost"))
    )
    return conclude(steps)


def table(steps: Sequence[Mapping[str, Any]]) -> str:
    """Return the loss of some steps, and the patches that each rank had to encode."""
    first = [event for event in steps if event["rank"] == 0]
    lines = [f"{'step':>5} {'loss':>7}   patches encoded by rank   patches of its own microbatches"]
    every = max(1, (len(first) - 1) // 5)
    for event in [*first[:-1:every], first[-1]]:
        ranks = [one for one in steps if one["step"] == event["step"]]
        ranks.sort(key=lambda one: one["rank"])
        shown = [" ".join(f"{sum(one[key]):>7,}" for one in ranks) for key in ("encoded", "used")]
        lines.append(f"{event['step'] + 1:>5} {event['loss']:>7.3f}   {shown[0]:>23}   {shown[1]}")
    lines.append(
        f"slowest rank over the mean: {imbalance(steps, 'encoded'):.2f} with encoder work "
        f"balanced, {imbalance(steps, 'used'):.2f} if each rank encoded its own"
    )
    return "\n".join(lines)


def imbalance(steps: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the patches of the slowest rank of each turn over the mean's, added up over turns."""
    turns: dict[tuple[int, int], list[int]] = {}
    for event in steps:
        for number, patches in enumerate(event[key]):
            turns.setdefault((event["step"], number), []).append(patches)
    slowest = sum(max(ranks) for ranks in turns.values())
    return slowest / (sum(sum(ranks) for ranks in turns.values()) / NUM_RANKS)


def conclude(steps: Sequence[Mapping[str, Any]]) -> int:
    """Return 0 if the loss fell, of the first few steps to the last few."""
    losses = [event["loss"] for event in steps if event["rank"] == 0]
    few = max(1, len(losses) // 5)
    fell = sum(losses[-few:]) < 0.8 * sum(losses[:few])
    if not fell:
        print("error: the loss did not fall", file=sys.stderr)
    return 0 if fell else 1


def main() -> int:
    """Run the example; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--photos", type=int, default=1000, help="pieces of photographs")
    options = parser.parse_args()
    try:
        return run(options.steps, options.photos)
    except TrainerError as error:
        sys.stderr.write(error.output)
        raise


if __name__ == "__main__":
    sys.exit(main())
