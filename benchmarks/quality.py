"""Does balancing or deferral change what a model learns, beyond what another seed would?

Trains the demo's model on two gloo ranks with the same documents in four orders, three seeds each:
as they come, placed by "assignment", with deferral too, and sorted by length, which must show up:
``python benchmarks/quality.py``. Compares the loss of documents that were held out, after the last
step and on the way. Exits with 1 where the first three differ by more than seeds do, or the sorted
order by less.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import reporting
from distributed import Client

import megadask as md
from megadask.demo.cluster import local_cluster
from megadask.demo.corpus import Corpus, build_corpus
from megadask.demo.trainers import TrainerError, Trainers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIXTURE = {"code": 0.3, "prose": 0.4, "docstrings": 0.3}
RANKS, PACKS, SEQ_LEN = 2, 4, 2048
SIZES = {"hidden": 32, "layers": 2, "heads": 2}
COST = md.costs.Transformer(hidden=32, layers=2, vocab=264, attention_slowdown=0.3)
LEARNING_RATE = 3e-3
STEPS, SEEDS, LOOKS = 300, 3, 6
#: Documents of each source that are held out.
HELD_OUT = 16
CORPUS_BYTES, QUICK_BYTES = 8_000_000, 1_000_000
#: How often longer documents may wait, and for how many equal ranks steps are kept even.
DEFER_STEPS, DEFER_WAYS = 8, 4
#: Order to its name in the report.
ORDERS = {
    "none": "as they come",
    "assignment": '"assignment"',
    "deferral": '"assignment", deferral',
    "sorted": "sorted by length (control)",
}
#: Losses of training are shown as means of so many steps.
SMOOTH = 20

Documents = dict[str, list[str]]


def documents(corpus: Corpus, steps: int) -> tuple[Documents, list[list[int]]]:
    """Return what the steps train on, in a random order, and tokens of what is held out."""
    readers: dict[str, Any] = {
        "code": md.readers.Parquet(corpus.sources["code"].pattern, ["text"]),
        "prose": md.readers.Jsonl(corpus.sources["prose"].pattern),
        "docstrings": md.readers.ArrowIpc(corpus.sources["docstrings"].pattern, ["text"]),
    }
    rng = np.random.default_rng(0)
    encode = md.transforms.Bytes("text")
    chosen: Documents = {}
    held: list[list[int]] = []
    for name, reader in readers.items():
        texts = [
            str(record["text"])
            for shard in range(len(reader.shards()))
            for record in reader.read(shard)
        ]
        texts = [texts[n] for n in rng.permutation(len(texts)) if len(texts[n]) > 1]
        for text in texts[:HELD_OUT]:
            sample = encode({"text": text})
            assert sample is not None
            held.append(sample["tokens"][: SEQ_LEN + 1].tolist())
        # About what the steps take, so that the sorted order is read once, from short to long.
        size_N = np.minimum([len(text.encode()) + 1 for text in texts[HELD_OUT:]], SEQ_LEN)
        wanted = steps * PACKS * SEQ_LEN * MIXTURE[name]
        count = int(np.searchsorted(np.cumsum(size_N), wanted)) + 1
        chosen[name] = texts[HELD_OUT : HELD_OUT + count]
    return chosen, held


def pipeline(order: str, chosen: Documents, seed: int) -> md.Pipeline:
    """Return the pipeline of one order."""
    by_length = order == "sorted"

    def strategy(graph: md.DGraph) -> None:
        graph.mix(MIXTURE, by="tokens")
        graph.distribute("dp").cost(COST).balance("none" if order == "none" else "assignment")
        if order == "deferral":
            graph.defer(steps=DEFER_STEPS, ways=DEFER_WAYS)

    sources = []
    for name, texts in chosen.items():
        rows = [{"text": text} for text in (sorted(texts, key=len) if by_length else texts)]
        reader = md.readers.InMemory(rows, shards=1 if by_length else 8)
        text = md.transforms.Bytes("text")
        sources.append(md.Source(name, reader, text, shuffle=not by_length))
    return md.Pipeline(
        sources=sources,
        topology=md.ClientPlaceTree(dp=RANKS),
        strategy=strategy,
        batching=md.Packed(SEQ_LEN, global_batch=PACKS, overflow="truncate"),
        seed=seed,
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run.

    losses_T: of every step; held_out: (steps made, loss); digests_T: what each step consisted of;
    imbalance: max / mean of the ranks as planned, mean of the steps.
    """

    losses_T: list[float]
    held_out: list[tuple[int, float]]
    digests_T: list[str]
    imbalance: float


def train(
    order: str, seed: int, chosen: Documents, steps: int, client: Client, folder: Path
) -> Run:
    """Train once."""
    own = folder / f"{order}-{seed}"
    own.mkdir()
    with md.serve(pipeline(order, chosen, seed), client, name=own.name) as service:
        options = {
            **{"address": service.address, "service": service.name},
            **{"held-out": folder / "held_out.json", "look-every": max(1, steps // LOOKS)},
            **{"seed": seed, "steps": steps, "learning-rate": LEARNING_RATE, **SIZES},
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        program = (sys.executable, str(Path(__file__).with_name("quality_rank.py")))
        with Trainers(RANKS, words, own, program=program, silence_s=600.0) as trainers:
            try:
                held_out = [
                    (int(event["step"]), float(event["loss"]))
                    for event in trainers.events()
                    if event["event"] == "held out" and event["rank"] == 0
                ]
            except TrainerError as error:
                sys.stderr.write(error.output)
                raise
        first = trainers.reports()[0].steps
        digests = [str(step["draw_digest"]) for step in service.stats()["steps"]]
        assert service.audit()["ok"]
    return Run(
        losses_T=[record.loss for record in first],
        held_out=held_out,
        digests_T=digests[:steps],
        imbalance=float(np.mean([record.planned_imbalance for record in first])),
    )


def plot(runs: dict[str, list[Run]]) -> Figure:
    """Return losses over steps: means over the seeds, and the range that they span."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for order, made in runs.items():
        width = min(SMOOTH, len(made[0].losses_T))
        window = np.ones(width) / width
        losses_ST = np.array([np.convolve(run.losses_T, window, "valid") for run in made])
        steps_T = np.arange(losses_ST.shape[1]) + width
        left.plot(steps_T, losses_ST.mean(axis=0), label=ORDERS[order])
        left.fill_between(steps_T, losses_ST.min(axis=0), losses_ST.max(axis=0), alpha=0.2)
        held_SL = np.array([[loss for _, loss in run.held_out] for run in made])
        looks = [step for step, _ in made[0].held_out]
        right.plot(looks, held_SL.mean(axis=0), "o-")
        right.fill_between(looks, held_SL.min(axis=0), held_SL.max(axis=0), alpha=0.2)
    left.set(xlabel="step", ylabel="loss (nats a byte)", title=f"Training, means of {SMOOTH} steps")
    right.set(xlabel="step", title="Documents held out")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    return figure


def verdict(runs: dict[str, list[Run]]) -> tuple[bool, str]:
    """Return whether all is as it should be, and the reasons in words.

    The first three have to agree after the last step and on the way there. The control may show up
    in either: all orders have read the same documents in the end.
    """
    looks = {
        "after the last step": lambda run: run.held_out[-1][1],
        "as the mean of all looks": lambda run: float(np.mean([loss for _, loss in run.held_out])),
    }
    is_same, shows, told = True, False, []
    for when, loss_of in looks.items():
        seen = {order: [loss_of(run) for run in made] for order, made in runs.items()}
        noise = max(seen["none"]) - min(seen["none"])
        off = {order: float(np.mean(seen[order]) - np.mean(seen["none"])) for order in runs}
        is_same &= all(abs(off[order]) <= noise for order in ("assignment", "deferral"))
        shows |= abs(off["sorted"]) > noise
        told.append(
            f"Held-out loss {when}: seeds alone spread that of arrival order by {noise:.4f}; from "
            f'its mean "assignment" is off by {off["assignment"]:+.4f}, deferral by '
            f"{off['deferral']:+.4f}, the sorted order by {off['sorted']:+.4f}."
        )
    told.append(f"Placement and deferral {'stay within' if is_same else 'leave'} the noise.")
    told.append(f"The control {'shows up' if shows else 'does not show up'}.")
    return is_same and shows, " ".join(told)


def main() -> None:
    parser = reporting.arguments(__doc__)
    parser.add_argument("--steps", type=int, help=f"{STEPS}, or 12 with --quick")
    parser.add_argument("--seeds", type=int, help=f"{SEEDS}, or 1 with --quick")
    options = parser.parse_args()
    steps = options.steps or (12 if options.quick else STEPS)
    seeds = options.seeds or (1 if options.quick else SEEDS)
    report = reporting.Report("quality", "What placement and deferral do to training", options)
    runs: dict[str, list[Run]] = {order: [] for order in ORDERS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        max_bytes = QUICK_BYTES if options.quick else CORPUS_BYTES
        chosen, held = documents(build_corpus(folder, max_bytes=max_bytes), steps)
        (folder / "held_out.json").write_text(json.dumps(held))
        with (
            local_cluster(2, folder) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            for seed in range(seeds):
                for order, made in runs.items():
                    made.append(train(order, seed, chosen, steps, client, folder))
                    loss = made[-1].held_out[-1][1]
                    reporting.progress(f"seed {seed}, {order}: held-out loss {loss:.4f}")
    for line in (
        f"{steps} steps of {PACKS} packs of {SEQ_LEN:,} bytes on {RANKS} gloo ranks; documents of "
        f"what is installed here ({', '.join(f'{len(t):,} {n}' for n, t in chosen.items())}), "
        f"longer ones truncated; {len(held)} held out",
        f"model of the demo, {SIZES}; AdamW, learning rate from {LEARNING_RATE} straight down to 0",
        f"a seed is that of the order of the documents and of the model's weights; {seeds} seeds",
        f"deferral: graph.defer(steps={DEFER_STEPS}, ways={DEFER_WAYS}); losses in nats a byte",
    ):
        report.note(line)
    rows = []
    for order, made in runs.items():
        others = [
            np.mean([a != b for a, b in zip(run.digests_T, plain.digests_T, strict=True)])
            for run, plain in zip(made, runs["none"], strict=True)
        ]
        last = [float(np.mean(run.losses_T[-SMOOTH:])) for run in made]
        rows.append(
            (
                ORDERS[order],
                reporting.spread([run.held_out[-1][1] for run in made], 4),
                reporting.spread(last, 4),
                f"{np.mean(others):.0%}",
                f"{np.mean([run.imbalance for run in made]):.3f}",
            )
        )
    report.table(
        "After the last step: median (least - largest) of the seeds",
        [
            *("order", "held-out loss", f"training loss, last {SMOOTH} steps"),
            *("steps of other samples", "planned max/mean"),
        ],
        rows,
    )
    is_fine, told = verdict(runs)
    report.say(told)
    report.plot(plot(runs), "losses by step")
    report.figures |= {
        order: [
            {"losses": run.losses_T, "held_out": run.held_out, "imbalance": run.imbalance}
            for run in made
        ]
        for order, made in runs.items()
    }
    report.write()
    if not is_fine and not options.quick:
        sys.exit(1)


if __name__ == "__main__":
    main()
