"""The demo's trainer: documents stay apart, and placement does not change the gradient (rule 19).

Run as a script, this file is one trainer process on hand-made batches; see `main`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from megadask.demo import train as demo  # noqa: E402
from megadask.demo.model import DocumentTransformer, ModelConfig, loss_sum  # noqa: E402
from megadask.demo.report import RankReport  # noqa: E402
from megadask.planner.batching import Packed  # noqa: E402
from megadask.planner.errors import ConfigError, PlanError  # noqa: E402
from megadask.scheduling.assemble import Pieces, assemble, num_loss_tokens  # noqa: E402

SPEC = Packed(seq_len=48, global_batch=8, micro_batch=2, pad_to_multiple=4)
LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34, 40]
DEADLINE_S = 90.0

Bin = tuple[int, int, int]  # rank, microbatch, pack
Batch = dict[str, Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class HandMadeStep:
    """What a loader yields, without a loader."""

    index: int
    batches: list[Batch]
    imbalance: float = 1.0

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def make_model(dtype: Any = torch.float64) -> DocumentTransformer:
    torch.manual_seed(0)
    return DocumentTransformer(ModelConfig(hidden=16, layers=2, heads=2)).to(dtype)


def make_documents(seed: int) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Return tokens and mask of documents; tokens count up from a start, to be learnt."""
    rng = np.random.default_rng(seed)
    return [
        ((rng.integers(256) + np.arange(length)) % 256, rng.random(length) < 0.8)
        for length in LENGTHS
    ]


def place(random: np.random.Generator, ranks: int, microbatches: int) -> list[Bin]:
    """Put every document in a random pack with room; there must be room."""
    bins = [
        (r, m, q)
        for r in range(ranks)
        for m in range(microbatches)
        for q in range(SPEC.micro_batch)
    ]
    room = dict.fromkeys(bins, SPEC.seq_len)
    placed: dict[int, Bin] = {}
    for n in np.argsort(LENGTHS)[::-1]:
        size = -(-LENGTHS[n] // SPEC.pad_to_multiple) * SPEC.pad_to_multiple
        fitting = [where for where in bins if room[where] >= size]
        placed[int(n)] = fitting[random.integers(len(fitting))]
        room[placed[int(n)]] -= size
    return [placed[n] for n in range(len(LENGTHS))]


def make_step(
    documents: list[tuple[Any, Any]], placed: list[Bin], ranks: int, microbatches: int
) -> list[list[Batch]]:
    """Return the microbatches of every rank."""
    made = []
    for rank in range(ranks):
        mine = []
        for microbatch in range(microbatches):
            rows = [
                (pack, *documents[n])
                for n, (r, m, pack) in enumerate(placed)
                if (r, m) == (rank, microbatch)
            ]
            mine.append(make_batch(rows))
            mine[-1]["is_last"] = microbatch == microbatches - 1
        made.append(mine)
    total = sum(batch["num_loss_tokens"] for mine in made for batch in mine)
    for mine in made:
        for batch in mine:
            batch["num_loss_tokens_step"] = total
    return made


def make_batch(rows: list[tuple[int, Any, Any]]) -> Batch:
    """Lay out (pack, tokens, mask) rows as one microbatch of torch tensors."""
    lengths = np.array([len(tokens) for _, tokens, _ in rows], np.int64)
    padded, filled, offsets = SPEC.padded(lengths), [0] * SPEC.micro_batch, []
    for (pack, _, _), size in zip(rows, padded, strict=True):
        offsets.append(filled[pack])
        filled[pack] += int(size)
    pieces = Pieces(
        pack_N=np.array([pack for pack, _, _ in rows], np.int64),
        offset_N=np.array(offsets, np.int64),
        start_N=np.zeros(len(rows), np.int64),
        stop_N=lengths,
        tokens=np.concatenate([np.empty(0, np.int64), *(tokens for _, tokens, _ in rows)]),
        token_offsets=np.cumsum([0, *lengths]).astype(np.int64),
        mask=np.concatenate([np.empty(0, bool), *(mask for _, _, mask in rows)]),
    )
    batch = assemble(SPEC, pieces)
    count = num_loss_tokens(batch)
    return {key: torch.from_numpy(array) for key, array in batch.items()} | {
        "num_loss_tokens": count,
        "num_loss_tokens_step": count,
        "is_last": True,
    }


def forward(model: DocumentTransformer, batch: Batch) -> Any:
    return model(batch["tokens"], batch["position_ids"], batch["cu_seqlens_padded"])


def gradient(model: DocumentTransformer) -> NDArray[np.float64]:
    parts = [parameter.grad.flatten() for parameter in model.parameters()]
    return np.asarray(torch.cat(parts).numpy())


def reference_gradient(documents: list[tuple[Any, Any]]) -> NDArray[np.float64]:
    """Return the gradient of the mean loss, each document computed alone."""
    model = make_model()
    total, count = 0.0, 0
    for tokens, mask in documents:
        batch = make_batch([(0, tokens, mask)])
        total = total + loss_sum(forward(model, batch), batch["labels"], batch["loss_mask"])
        count += batch["num_loss_tokens"]
    (total / count).backward()  # type: ignore[attr-defined]
    return gradient(model)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_a_document_in_a_pack_has_the_logits_that_it_has_alone(
    seed: int, microbatches: int
) -> None:
    model = make_model()
    documents = make_documents(seed % 7)
    placed = place(np.random.default_rng(seed), 2, microbatches)
    for mine in make_step(documents, placed, 2, microbatches):
        for batch in mine:
            check_documents_alone(model, batch)


def check_documents_alone(model: DocumentTransformer, batch: Batch) -> None:
    with torch.no_grad():
        logits = forward(model, batch)
        for q in range(SPEC.micro_batch):
            lengths, starts = batch["cu_seqlens"][q].diff(), batch["cu_seqlens_padded"][q, :-1]
            for length, start in zip(lengths.tolist(), starts.tolist(), strict=True):
                inside = slice(start, start + length)
                if length:
                    tokens = batch["tokens"][q, inside][None]
                    alone = model(tokens, torch.arange(length)[None], torch.tensor([[0, length]]))
                    torch.testing.assert_close(logits[q, inside], alone[0])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3))
def test_the_gradient_of_a_step_is_the_same_however_it_is_placed(
    seed: int, ranks: int, microbatches: int
) -> None:
    if ranks * microbatches < 2:
        microbatches = 2  # else there is no room
    documents = make_documents(seed % 7)
    placed = place(np.random.default_rng(seed), ranks, microbatches)
    gradients = []
    for mine in make_step(documents, placed, ranks, microbatches):
        trainer = demo.Trainer(make_model())
        trainer.world_size = ranks
        work = trainer.accumulate(mine)
        assert work.num_microbatches == microbatches
        gradients.append(gradient(trainer.model))
    np.testing.assert_allclose(
        np.mean(gradients, axis=0), reference_gradient(documents), rtol=1e-7, atol=1e-10
    )


def test_a_microbatch_without_documents_has_loss_0_and_finite_gradients() -> None:
    trainer = demo.Trainer(make_model())
    record = trainer.train_step(HandMadeStep(3, [make_batch([])]))
    assert (record.step, record.loss, record.tokens, record.loss_tokens) == (3, 0.0, 0, 0)
    assert not gradient(trainer.model).any()


def test_a_microbatch_of_masked_documents_has_loss_0_and_finite_gradients() -> None:
    trainer = demo.Trainer(make_model())
    batch = make_batch([(0, np.arange(9), np.zeros(9, bool)), (1, np.arange(1), np.ones(1, bool))])
    assert trainer.train_step(HandMadeStep(0, [batch])).loss == 0.0
    assert not gradient(trainer.model).any()


def test_a_step_without_its_last_microbatch_is_an_error() -> None:
    batch = make_batch([(0, np.arange(9), np.ones(9, bool))]) | {"is_last": False}
    for batches in ([], [batch]):
        with pytest.raises(PlanError, match="last microbatch"):
            demo.Trainer(make_model()).accumulate(batches)


def test_training_makes_the_loss_smaller_and_keeps_to_its_limit() -> None:
    trainer = demo.Trainer(make_model(torch.float32), learning_rate=1e-2)
    records = list(demo.train(trainer, hand_made_steps(0, 1, 30), limit=25))
    assert [record.step for record in records] == list(range(25))
    assert records[0].loss == pytest.approx(np.log(264), abs=0.3)
    assert records[-1].loss < records[0].loss - 1
    assert all(record.tokens == sum(LENGTHS) for record in records)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"RANK": None}, "RANK"), ({"MASTER_ADDR": "10.0.0.1"}, "MASTER_ADDR")],
)
def test_a_trainer_says_what_its_environment_lacks(
    changed: dict[str, str | None], message: str
) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | changed
    with pytest.raises(ConfigError, match=message):
        demo.Placement.from_env({name: value for name, value in env.items() if value is not None})


@pytest.mark.slow
def test_two_processes_make_the_gradient_of_one_and_do_not_count_the_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "computed")
    with trainers("gradient", tmp_path) as processes:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    expected = reference_gradient(make_documents(0))
    for rank in range(2):
        np.testing.assert_allclose(
            np.load(tmp_path / f"{rank}.npy"), expected, rtol=1e-7, atol=1e-10
        )


@pytest.mark.slow
def test_two_processes_train_like_one_until_the_data_ends(tmp_path: Path) -> None:
    with trainers("train", tmp_path) as processes:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    alone = list(demo.train(demo.Trainer(demo_model()), hand_made_steps(0, 1, 3), limit=9))
    for rank, (stdout, _) in enumerate(outputs):
        report = RankReport.from_json((tmp_path / f"report{rank}.json").read_text())
        assert (report.rank, report.world_size, report.ended) == (rank, 2, "end")
        assert [r.loss for r in report.steps] == pytest.approx([r.loss for r in alone], rel=1e-3)
        assert (tmp_path / f"closed{rank}").exists()
        events = [json.loads(line) for line in stdout.splitlines()]
        assert [e["event"] for e in events] == ["ready", "step", "step", "step", "end"]
        assert [e["loss"] for e in events[1:-1]] == [r.loss for r in report.steps]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.slow
def test_stopped_processes_close_their_loader_and_exit_by_the_signal(tmp_path: Path) -> None:
    with trainers("stuck", tmp_path) as processes:
        for process in processes:
            assert process.stdout is not None
            while json.loads(process.stdout.readline())["event"] != "step":
                pass
        # Rank 0 waits for data; rank 1 waits for data or, in the reduction, for rank 0.
        for process, signum in zip(processes, (signal.SIGTERM, signal.SIGINT), strict=True):
            process.send_signal(signum)
        outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    assert [process.returncode for process in processes] == [143, 130], outputs
    for rank, (stdout, stderr) in enumerate(outputs):
        assert json.loads(stdout.splitlines()[-1])["ended"] == "signal"
        assert "Traceback" not in stderr
        report = RankReport.from_json((tmp_path / f"report{rank}.json").read_text())
        assert (report.ended, len(report.steps)) == ("signal", 1)
        assert (tmp_path / f"closed{rank}").exists()


# --- One trainer process.


@contextmanager
def trainers(mode: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Run this file in two processes; none is left afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    try:
        for rank in range(2):
            env = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            }
            command = [sys.executable, __file__, mode, str(folder)]
            pipe = subprocess.PIPE
            processes.append(
                subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def demo_model() -> DocumentTransformer:
    torch.manual_seed(0)
    return DocumentTransformer(ModelConfig(hidden=16, layers=1))


def hand_made_steps(rank: int, ranks: int, count: int) -> Iterator[HandMadeStep]:
    for index in range(count):
        placed = place(np.random.default_rng(index), ranks, 2)
        yield HandMadeStep(index, make_step(make_documents(index % 3), placed, ranks, 2)[rank])


class HandMadeLoader:
    """Three steps; a "stuck" one gives rank 0 one step and rank 1 the others too, then waits."""

    def __init__(self, mode: str, folder: Path, rank: int) -> None:
        self.mode, self.folder, self.rank = mode, folder, rank

    def steps(self) -> Iterator[HandMadeStep]:
        for step in hand_made_steps(self.rank, 2, 3):
            if self.mode == "stuck" and self.rank == 0 and step.index == 1:
                signal.pause()
            yield step

    def stats(self) -> dict[str, Any]:
        return {"wait_s": 0.0}

    def __enter__(self) -> HandMadeLoader:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / f"closed{self.rank}").touch()


def compute_gradient(folder: Path, rank: int) -> None:
    """Save this rank's gradient; rank 1 computes when rank 0's clock has stopped, not before."""
    demo.join_group(demo.Placement.from_env(os.environ), timeout_s=DEADLINE_S)
    trainer = demo.Trainer(make_model())
    placed = place(np.random.default_rng(5), 2, 2)
    batches = make_step(make_documents(0), placed, 2, 2)[rank]
    stop, stops = trainer._clock.stop, []

    def stop_and_tell() -> None:
        stop()
        stops.append(1)
        if len(stops) == 2:  # once a microbatch
            (folder / "computed").write_text("")

    def wait_and_yield() -> Iterator[Batch]:
        yield batches[0]
        (folder / "computed").read_text()  # a FIFO
        yield batches[1]

    if rank == 0:
        trainer._clock.stop = stop_and_tell  # type: ignore[method-assign]
    trainer.accumulate(batches if rank == 0 else wait_and_yield())
    np.save(folder / f"{rank}.npy", gradient(trainer.model))
    torch.distributed.destroy_process_group()


def main(argv: Sequence[str]) -> int:
    mode, folder, rank = argv[0], Path(argv[1]), int(os.environ["RANK"])
    if mode == "gradient":
        compute_gradient(folder, rank)
        return 0

    def connect(address: str, *, service: str, rank: int) -> HandMadeLoader:
        assert (address, service) == ("tcp://nowhere:1", "megadask")
        return HandMadeLoader(mode, folder, rank)

    demo.md.connect = connect  # type: ignore[assignment]
    report = folder / f"report{rank}.json"
    return demo.main(
        f"--address tcp://nowhere:1 --steps 9 --hidden 16 --layers 1 --report {report}".split()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
