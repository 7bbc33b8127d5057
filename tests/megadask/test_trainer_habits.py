"""What training loops do with a loader and its batches, and what they may rely on."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Client
from torch._dynamo.testing import CompileCounter

import megadask as md
from megadask.trainer.presets import FACTS
from tests.conftest import make_cluster
from tests.megadask.helpers import faulty
from tests.megadask.helpers.data import corpus, pipeline, records, unfold_small
from tests.megadask.helpers.ranks import connect, run
from tests.megadask.helpers.seen import Seen, digest, drain, see, shape, spans_of
from tests.test_docs import blocks

pytestmark = pytest.mark.timeout(120)

DATA = corpus({"a": 40, "b": 25}, longest=300)
VALIDATION = corpus({"v": 30}, longest=200, seed=5)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def whole(client: Client) -> list[list[Seen]]:
    """What two ranks see of a whole run, iterating flat."""
    with md.serve(pipeline(DATA), client, name="whole") as service:
        return run(service, drain)


# Names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"preset": "jax"}, "preset.*'jax'"),
        ({"names": {"token": "input_ids"}}, "names.*'token'"),
        ({"names": {"tokens": "labels"}}, "one name.*'labels'"),
        ({"names": {"tokens": "step"}}, "one name.*'step'"),
        ({"names": {"tokens": "x", "labels": "x"}}, "one name.*'x'"),
        ({"names": {"tokens": 1}}, "dict of names"),
        ({"names": ["tokens"]}, "dict of names"),
        ({"names": {"labels": "y"}, "keys": ["tokens"]}, "names.*'labels'"),
        ({"names": {"tokens": "ids"}, "preset": "hf"}, "names.*'tokens'"),
        ({"keys": ["labels"], "preset": "hf"}, "both of.*loss_mask"),
        ({"keys": ["cu_seqlens_padded"], "preset": "hf"}, "both of.*max_seqlen"),
        ({"pin_memory": "yes"}, "pin_memory"),
    ],
)
def test_options_that_cannot_work_are_refused_at_connect(
    client: Client, options: dict[str, Any], match: str
) -> None:
    with (
        md.serve(pipeline(DATA), client, name="refused") as service,
        pytest.raises(md.errors.ConfigError, match=match),
    ):
        connect(service, 0, **options)


def test_names_map_keys_of_the_final_batch(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=name) as service:
        plain, _ = run(service, lambda loader: list(islice(loader, 1)))
    names = {"tokens": "x", "labels": "tokens", "step": "index"}  # a chain is no collision
    with md.serve(pipeline(DATA), client, name=name) as service:
        mapped, _ = run(service, lambda loader: [b for s in loader.steps() for b in s], names=names)
    (one,), other = plain, mapped[0]
    assert torch.equal(other["x"], one["tokens"])
    assert torch.equal(other["tokens"], one["labels"])
    assert other["index"] == 0
    assert set(other) == {names.get(key, key) for key in one}
    inputs = set(md.model_inputs(other))
    assert inputs == {names.get(key, key) for key in one if key not in FACTS} | {"index"}


# Stages of a pipeline ---------------------------------------------------------------------------


def test_keys_ask_for_more_on_any_stage(client: Client, name: str) -> None:
    """As multi-token prediction does: tokens on the last stage."""
    tree = md.ClientPlaceTree(pp=3)
    keys = ["tokens", "labels", "loss_mask", "cu_seqlens"]
    with md.serve(pipeline(DATA, topology=tree), client, name=name) as service:
        ranks = run(service, list, keys=keys)
        assert service.audit()["ok"]
    for first, *others in zip(*ranks, strict=True):
        assert set(md.model_inputs(first)) == set(keys)
        for other in others:
            assert digest(other) == digest(first)


def test_two_stages_share_inputs_and_targets(client: Client, name: str) -> None:
    with md.serve(pipeline(DATA), client, name=f"{name}-1") as service:
        expected, _ = run(service, list)
    tree = md.ClientPlaceTree(dp=2, pp=2)
    with md.serve(pipeline(DATA, topology=tree), client, name=name) as service:
        first, _, last, _ = run(service, list)
    ends = {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"}
    for batch, one, two in zip(expected, first, last, strict=True):
        assert set(md.model_inputs(one)) == {"tokens", "position_ids"} | ends
        assert set(md.model_inputs(two)) == {"labels", "loss_mask"} | ends
        for stage in (one, two):
            for key, value in md.model_inputs(stage).items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(batch[key]))
            assert stage["num_loss_tokens"] == batch["num_loss_tokens"]
            assert stage["num_loss_tokens_step"] == batch["num_loss_tokens_step"]


# Habits of torch --------------------------------------------------------------------------------


def test_a_loop_may_break_and_go_on(client: Client, name: str, whole: list[list[Seen]]) -> None:
    def body(loader: md.Loader) -> list[Seen]:
        seen = [see(next(iter(loader)))]
        for number, batch in enumerate(loader):
            seen.append(see(batch))
            if number == 2:
                break
        seen += [see(batch) for batch in islice(loader, 2)]
        iterator = iter(loader)
        seen.append(see(next(iterator)))
        assert bool(loader)
        loader.set_epoch(1)
        return seen + [see(batch) for batch in iterator]

    with md.serve(pipeline(DATA), client, name=name) as service:
        assert run(service, body) == whole
        assert service.audit()["ok"]


def test_len_is_known_after_a_whole_validation_pass(client: Client, name: str) -> None:
    both = {"train": pipeline(DATA), "val": pipeline(DATA, restart=True)}

    def validate(loader: md.Loader) -> Any:
        with pytest.raises(TypeError, match="filtered"):
            len(loader)
        list(islice(loader, 2))
        with pytest.raises(TypeError):  # a pass that broke off tells nothing
            len(loader)
        count = sum(1 for _ in loader)
        flat = len(loader)
        steps = sum(len(step) for step in map(_used, loader.steps()))
        return count, flat, steps, len(loader), len(list(loader.iterators(1)[0])), len(loader)

    def train(loader: md.Loader) -> None:
        list(loader)
        with pytest.raises(TypeError, match="restart=True"):
            len(loader)

    with md.serve(both, client, name=name) as service:
        for counts in run(service, validate, pipeline="val"):
            assert len(set(counts)) == 1
            assert counts[0] > 2
        run(service, train)


def _used(step: Any) -> Any:
    list(step)
    return step


def test_set_epoch_changes_nothing_and_checks_its_argument(
    client: Client, name: str, whole: list[list[Seen]]
) -> None:
    def body(loader: md.Loader) -> list[Seen]:
        before = loader.state_dict()
        loader.set_epoch(3)
        assert loader.state_dict() == before
        for wrong in (-1, 1.0, True, None):
            with pytest.raises(md.errors.ConfigError, match="set_epoch"):
                loader.set_epoch(wrong)  # type: ignore[arg-type]
        return drain(loader)

    with md.serve(pipeline(DATA), client, name=name) as service:
        assert run(service, body) == whole


def test_pinning_without_cuda_is_a_warning(
    client: Client, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = pipeline(DATA, topology=md.ClientPlaceTree())
    with (
        md.serve(made, client, name=name) as service,
        caplog.at_level(logging.WARNING),
        connect(service, 0, pin_memory=True) as loader,
    ):
        assert not next(iter(loader))["tokens"].is_pinned()
    assert any("pin_memory" in record.getMessage() for record in caplog.records)


def test_pinning_pins_every_tensor(
    client: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a device, which here there is not: `Tensor.pin_memory` is what does it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: ("pinned", self))
    made = pipeline(DATA, topology=md.ClientPlaceTree())
    with (
        md.serve(made, client, name=name) as service,
        connect(service, 0, pin_memory=True) as loader,
    ):
        batch = next(iter(loader))
    assert {key for key, value in batch.items() if isinstance(value, tuple)} == {
        *("tokens", "labels", "loss_mask", "position_ids"),
        *("cu_seqlens", "cu_seqlens_padded", "spans"),
    }


# Batches and their memory -----------------------------------------------------------------------


def test_batches_stay_right_after_everything_else_has_ended(client: Client, name: str) -> None:
    """64 at a time, more than are kept on their way; after close, and after the service."""
    data = {"a": records(np.random.default_rng(0).integers(4, 120, 400))}
    with md.serve(pipeline(data), client, name=name) as service:

        def body(loader: md.Loader) -> Any:
            kept = list(islice(loader, 64))
            return kept, [see(batch) for batch in kept], [see(batch) for batch in loader]

        results = run(service, body, prefetch=2)
        after_close = [[see(batch) for batch in kept] for kept, _, _ in results]
    for (kept, then, rest), closed in zip(results, after_close, strict=True):
        assert rest, "there have to be later batches, which might write over earlier ones"
        assert len(kept) == 64
        assert [see(batch) for batch in kept] == closed == then


@pytest.mark.parametrize("protocol", ["tcp", "inproc"])
def test_overwriting_a_batch_changes_no_other(name: str, protocol: str) -> None:
    """Not another rank's of the same bucket, not one that is fetched again, not a later one."""
    made = pipeline(DATA, topology=md.ClientPlaceTree(tp=2))
    with (
        make_cluster(processes=False, n_workers=1, protocol=protocol) as cluster,
        Client(cluster, set_as_default=False) as client,
        md.serve(made, client, name=name) as service,
    ):
        with connect(service, 0) as first:
            before, taken = [], list(islice(first, 8))
            for batch in taken:
                before.append(see(batch))
                for value in batch.values():
                    if isinstance(value, torch.Tensor):
                        value.fill_(-3)
        with connect(service, 1) as second:
            assert [see(batch) for batch in islice(second, 8)] == before
        with connect(service, 0) as again:  # from its last acknowledged batch on
            rest = drain(again)
    assert rest[0] not in before[:-1]
    assert len(rest) > 8


# Compiled models --------------------------------------------------------------------------------


def docs_step_loss() -> Any:
    namespace: dict[str, Any] = {}
    (block,) = [one for one in blocks(ROOT / "docs" / "batches.md") if "def step_loss" in one]
    exec(block, namespace)
    return namespace["step_loss"]


class Net(torch.nn.Module):
    """Looks at all tensors of a batch: tokens, positions and where documents begin."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(512, 16)
        self.out = torch.nn.Linear(16, 512)

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        starts = batch["cu_seqlens_padded"]
        at = torch.arange(batch["max_seqlen"])
        document = torch.searchsorted(starts, at.expand(len(starts), -1).int(), right=True)
        allowed = (document[:, :, None] == document[:, None]) & (at[:, None] >= at)
        hidden = self.embed(batch["tokens"]) + batch["position_ids"][..., None] / 100
        weights = (hidden @ hidden.mT).masked_fill(~allowed, -torch.inf).softmax(-1)
        return self.out(weights @ hidden)


def test_50_batches_are_one_graph(client: Client, name: str) -> None:
    """With ``dynamic=False``, as all shapes are static and facts stay outside."""
    data = {"a": records(np.random.default_rng(1).integers(1, 90, 300))}
    made = pipeline(
        data,
        seq_len=64,
        topology=md.ClientPlaceTree(),
        global_batch=2,
        sources={"transform": unfold_small},
    )
    torch._dynamo.reset()
    counter = CompileCounter()
    model = Net()
    forward = torch.compile(model, backend=counter, dynamic=False, fullgraph=True)
    step_loss = docs_step_loss()
    with md.serve(made, client, name=name) as service, connect(service, 0) as loader:
        batches = list(islice(loader, 50))
    assert len(batches) == 50
    assert len({len(batch["sample_ids"]) for batch in batches}) > 3
    assert len({batch["num_loss_tokens"] for batch in batches}) > 3
    for batch in batches:
        step_loss(forward(md.model_inputs(batch)), batch, 1).backward()
    assert counter.frame_count == 1


def test_a_microbatch_without_targets_gives_0_and_a_finite_gradient(
    client: Client, name: str
) -> None:
    """One document for two ranks: one of them gets a filler."""
    step_loss = docs_step_loss()
    made = pipeline({"a": records([50])}, sources={"transform": unfold_small})
    with md.serve(made, client, name=name) as service:
        batches = [batch for seen in run(service, list) for batch in seen]
    assert sorted(batch["num_loss_tokens"] for batch in batches) == [0] * (len(batches) - 1) + [49]
    for batch in batches:
        model = Net()
        loss = step_loss(model(batch), batch, 2)
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(torch.isfinite(one).all() for one in gradients if one is not None)
        assert (loss == 0) == (not batch["num_loss_tokens"])
        if not batch["num_loss_tokens"]:
            assert not any(one.any() for one in gradients if one is not None)


# A corrupt sample -------------------------------------------------------------------------------


def nine(on_error: str, **options: Any) -> md.Pipeline:
    """Ten records in one lane, of which decoding the sixth raises."""
    return pipeline(
        {"a": records([32] * 10)},
        seq_len=32,
        global_batch=2,
        window=1,
        sources={
            **{"transform": faulty.raise_at_bad, "on_error": on_error, "shards": 1, "lanes": 1},
            **options,
        },
    )


def test_scenario_9_skip(client: Client, name: str) -> None:
    """The other 9 in order, one named error, equal steps on all ranks."""
    with md.serve(nine("skip"), client, name=name) as service:
        ranks = run(service, list)
        stats, audit = service.stats(), service.audit()
    assert shape(map(see, ranks[0])) == shape(map(see, ranks[1]))
    rows = sorted((b["step"], spans_of(b)) for seen in ranks for b in seen if b["sample_ids"])
    ids = [[span[3] for span in spans] for _, spans in rows]
    by_step = [ids[i : i + 2] for i in range(0, len(ids), 2)]
    assert [sorted(chain(*step)) for step in by_step] == [[0, 1], [2, 3], [4, 6], [7, 8], [9]]
    (reason,) = [why for one in stats["loaders"] for why in one["skip_reasons"]]
    assert "UserError: cannot decode 5" in reason
    assert audit["sources"]["a"]["samples"]["skipped"] == 1


def test_scenario_9_raise(client: Client, name: str) -> None:
    """What the transform raised reaches every trainer as it is."""

    def body(loader: md.Loader) -> Any:
        with pytest.raises(faulty.UserError, match="cannot decode 5") as caught:
            list(loader)
        return caught.type

    with md.serve(nine("raise"), client, name=name) as service:
        assert run(service, body) == [faulty.UserError] * 2


def test_scenario_9_many_in_a_row(client: Client, name: str) -> None:
    made = nine("skip", transform=faulty.raise_always, max_consecutive_errors=4)

    def body(loader: md.Loader) -> Any:
        with pytest.raises(md.errors.SourceError, match="max_consecutive_errors=4") as caught:
            list(loader)
        return caught.type

    with md.serve(made, client, name=name) as service:
        assert run(service, body) == [md.errors.SourceError] * 2


# Frameworks that ask for a batch ahead ----------------------------------------------------------


def test_confirmed_batches_alone_count(client: Client, name: str, whole: list[list[Seen]]) -> None:
    def body(loader: md.Loader) -> Any:
        start = loader.state_dict()
        batches = iter(loader)
        seen = [see(next(batches)), see(next(batches))]
        assert loader.state_dict() == start  # nothing is done
        loader.done()
        one = loader.state_dict()
        assert (one["step"], one["microbatch"]) == (0, 1)
        seen.append(see(next(batches)))
        loader.load_state_dict(one)
        with pytest.raises(md.errors.ConfigError, match="no batch left"):
            loader.done()  # what was given before belongs to another timeline
        assert loader.state_dict() == one
        assert [see(batch) for batch in islice(loader, 2)] == seen[1:]
        loader.done()
        return loader.state_dict()["microbatch"]

    with md.serve(pipeline(DATA), client, name=name) as service:
        assert run(service, body, confirm=True) == [2, 2]
        assert set(map(tuple, service.stats()["watermarks"].values())) == {(0, 2)}
        rest = run(service, drain)
    assert rest == [seen[2:] for seen in whole]


def test_done_belongs_to_loaders_that_want_it(client: Client, name: str) -> None:
    made = pipeline(DATA, topology=md.ClientPlaceTree())
    with md.serve(made, client, name=name) as service:
        with connect(service, 0) as loader, pytest.raises(md.errors.ConfigError, match="confirm"):
            loader.done()
        with (
            connect(service, 0, confirm=True) as loader,
            pytest.raises(md.errors.ConfigError, match="iterators"),
        ):
            loader.iterators(2)


def test_who_forgets_done_is_told_so(client: Client, name: str) -> None:
    made = pipeline(DATA, topology=md.ClientPlaceTree())
    with (
        md.serve(made, client, name=name, limits=md.Limits(lead_steps=1)) as service,
        connect(service, 0, confirm=True, timeout=3) as loader,
        pytest.raises(md.errors.DeadlineError) as raised,
    ):
        list(loader)
    assert re.search(r"16 are not confirmed.*loader\.done\(\)", raised.value.__notes__[-1])


def test_no_more_is_asked_for_than_can_be_on_its_way(client: Client, name: str) -> None:
    made = pipeline(DATA, topology=md.ClientPlaceTree())  # 8 microbatches a step
    with (
        md.serve(made, client, name=name, limits=md.Limits(lead_steps=1)) as service,
        connect(service, 0, prefetch=10_000) as loader,
    ):
        next(iter(loader))
        assert len(loader._link._inflight) < 3 * 8
        assert {sample for batch in loader for sample in batch["sample_ids"]}


@pytest.mark.timeout(300)
def test_lightning_resumes_behind_what_it_trained_on(
    client: Client, name: str, tmp_path: Path
) -> None:
    """From a checkpoint in the middle of a step; without `confirm` a batch would be missing.

    It validates meanwhile, twice in every run, and before the first step two batches.
    """
    import lightning

    seen: list[tuple[int, int]] = []
    validated: list[tuple[int, int]] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            seen.append((batch["step"], batch["microbatch"]))
            return (self.weight * batch["loss_mask"]).sum()

        def validation_step(self, batch: Any, index: int) -> None:
            validated.append((batch["step"], batch["microbatch"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Confirm(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            trainer.train_dataloader.done()

    def fit(loader: md.Loader, val: md.Loader, steps: int, checkpoint: str | None) -> Any:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
        trainer = lightning.Trainer(
            max_steps=steps,
            callbacks=[Confirm()],
            accelerator="cpu",
            devices=1,
            enable_model_summary=False,
            val_check_interval=3,
            check_val_every_n_epoch=None,
            **quiet,
        )
        trainer.fit(Module(), loader, val, ckpt_path=checkpoint, weights_only=False)
        return trainer

    made = pipeline(DATA, topology=md.ClientPlaceTree(), global_batch=4)
    path = str(tmp_path / "last.ckpt")
    with md.serve(made, client, name=f"{name}-1") as service, connect(service, 0) as loader:
        expected = [(batch["step"], batch["microbatch"]) for batch in islice(loader, 9)]
    both = {"train": made, "val": pipeline(VALIDATION, topology=made.topology, restart=True)}
    with md.serve(both, client, name=name) as service, connect(service, 0, pipeline="val") as val:
        passed = [(batch["step"], batch["microbatch"]) for batch in val]
        with connect(service, 0, confirm=True) as loader:
            fit(loader, val, 6, None).save_checkpoint(path)
        assert validated == passed[:2] + passed * 2
        with connect(service, 0, confirm=True) as loader:
            trainer = fit(loader, val, 9, path)
            assert trainer.global_step == 9
    assert seen == expected
