"""One rank of a process group fetches microbatches and passes them on to the others.

Life cycle: `Share.of` is a collective, and so is `Share.complete` for every microbatch, in the
order of the microbatches. What the fetching rank fails with is raised on all others too. Nothing
waits longer than its deadline: then it is a DeadlineError, and the group is of no more use.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megadask.planner.errors import ConfigError
from megadask.scheduling.delivery import Microbatch
from megadask.scheduling.errors import DeadlineError, StaleError, pack_error, unpack_error
from megadask.scheduling.items import exchanged_keys
from megadask.scheduling.trainer_link import TrainerLink

logger = logging.getLogger(__name__)

#: How much longer than the fetching rank the others wait: it says that it failed by then.
GRACE_S = 5.0

_DELIVERIES = ("payload", "broadcast", "shapes")
_BATCH, _ERROR = 0, 1

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Layout:
    """Names, types and shapes of the arrays of a microbatch, and where they lie in one buffer."""

    header: bytes

    @classmethod
    def of(cls, arrays: Arrays) -> _Layout:
        rows = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        return cls(json.dumps(rows, separators=(",", ":")).encode())

    def join(self, arrays: Arrays) -> NDArray[np.uint8]:
        flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays.values()]
        parts = [array.view(np.uint8) for array in flat]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)

    def split(self, buffer: NDArray[np.uint8]) -> Arrays:
        """Return the arrays, each with memory of its own."""
        arrays, first = {}, 0
        for name, dtype, shape in json.loads(self.header):
            array = np.empty(shape, dtype)
            part = buffer[first : first + array.nbytes]
            array.reshape(-1).view(np.uint8)[:] = part
            first += array.nbytes
            arrays[name] = array
        return arrays


class Share:
    """Passes microbatches on within a process group. Made by `of`.

    Parameters
    ----------
    group
        The process group.
    rank
        Of this trainer in the mesh.
    root
        Rank in the mesh of the member that fetches.
    source
        The same member by its number in ``torch.distributed``.
    timeout_s
        Longest wait for a microbatch.
    keys
        The arrays to keep; None for all.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        root: int,
        source: int,
        *,
        timeout_s: float,
        keys: Sequence[str] | None,
    ) -> None:
        self._group = group
        self._device = _device(group)
        self._rank = rank
        self._root = root
        self._source = source
        self._timeout_s = timeout_s
        self._keys = keys
        self._layout: _Layout | None = None

    @classmethod
    def of(
        cls, group: Any, link: TrainerLink, *, timeout_s: float, keys: Sequence[str] | None
    ) -> Share | None:
        """Agree with all members who fetches; None where every member fetches for itself.

        Raises
        ------
        ConfigError
            The members do not have one rank that fetches, and that is a member; on all of them.
        DeadlineError
            Not all of them came.
        """
        own = [link.rank, link.place["root"], _DELIVERIES.index(link.place["delivery"])]
        device = _device(group)
        mine = torch.tensor(own, device=device)
        members = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
        work = dist.all_gather(members, mine, group=group, async_op=True)
        _wait(work, timeout_s, f"rank {link.rank}: all members of connect(group=)")
        rows = [member.tolist() for member in members]
        ranks, roots = [row[0] for row in rows], {row[1] for row in rows}
        described = "; ".join(f"rank {r} from rank {root}" for r, root, _ in rows)
        if all(_DELIVERIES[way] != "broadcast" for _, _, way in rows):
            if len(roots) > 1:
                raise ConfigError(
                    "connect(group=): nothing is broadcast in this group",
                    got=described,
                    remedy='Declare graph.broadcast_at("tp") in the strategy.',
                )
            return None
        if len(roots) > 1 or not roots <= set(ranks) or len(set(ranks)) < len(ranks):
            raise ConfigError(
                "connect(group=): not the ranks that one of them fetches for",
                got=described,
                limit="the ranks along the axes of broadcast_at, that is along "
                f"{tuple(link.place['broadcast_axes'])}",
            )
        if "cp" in link.place["broadcast_axes"] and link.place["num_slices"] > 1:
            raise ConfigError(
                "connect(group=) with broadcast_at('cp')",
                got=f"{link.place['num_slices']} slices of each sequence",
                limit="ranks that get the same slice",
                remedy="Broadcast along tp; every context-parallel rank fetches its own slice.",
            )
        (root,) = roots
        source = dist.get_global_rank(group, ranks.index(root))
        return cls(group, link.rank, root, source, timeout_s=timeout_s, keys=keys)

    @property
    def is_root(self) -> bool:
        """Whether this rank fetches."""
        return self._rank == self._root

    def complete(self, microbatch: Microbatch) -> Microbatch:
        """Return a microbatch with the arrays of the one that the root fetched."""
        slot = (microbatch.step, microbatch.microbatch)
        own = exchanged_keys(microbatch.arrays)
        if self.is_root:
            self._send(slot, {k: a for k, a in microbatch.arrays.items() if k not in own})
            return microbatch
        arrays = self._receive(slot) | {key: microbatch.arrays[key] for key in own}
        if self._keys is not None:
            arrays = {name: array for name, array in arrays.items() if name in self._keys}
        return replace(microbatch, arrays=arrays, made=None)

    def fail(self, error: Exception) -> None:
        """Tell the others what the root failed with; does not raise."""
        if not self.is_root:
            return
        data = np.frombuffer(pack_error(error), np.uint8)
        with suppress(DeadlineError):
            self._broadcast(torch.tensor([_ERROR, 0, 0, 0, len(data)]), GRACE_S)
            self._broadcast(torch.from_numpy(data.copy()), GRACE_S)

    def _send(self, slot: tuple[int, int], arrays: Arrays) -> None:
        layout = _Layout.of(arrays)
        news = b"" if layout == self._layout else layout.header
        self._layout = layout
        buffer = layout.join(arrays)
        self._broadcast(torch.tensor([_BATCH, *slot, len(news), len(buffer)]), self._timeout_s)
        if news:
            self._broadcast(torch.frombuffer(bytearray(news), dtype=torch.uint8), self._timeout_s)
        self._broadcast(torch.from_numpy(buffer), self._timeout_s)

    def _receive(self, slot: tuple[int, int]) -> Arrays:
        seconds = self._timeout_s + GRACE_S
        head = self._broadcast(torch.zeros(5, dtype=torch.int64), seconds)
        kind, step, microbatch, header_bytes, num_bytes = head.tolist()
        if header_bytes:
            header = self._broadcast(torch.empty(header_bytes, dtype=torch.uint8), seconds)
            self._layout = _Layout(header.numpy().tobytes())
        buffer = self._broadcast(torch.empty(num_bytes, dtype=torch.uint8), seconds).numpy()
        if kind == _ERROR:
            error = unpack_error(buffer.tobytes())
            error.add_note(f"It reached rank {self._rank} by rank {self._root}, which fetches.")
            raise error
        if (step, microbatch) != slot:
            raise StaleError(
                "ranks of connect(group=) are not at the same microbatch",
                got=f"rank {self._rank} at {slot}, rank {self._root} at {(step, microbatch)}",
                remedy="Every rank of the group takes every microbatch; load states on all.",
            )
        assert self._layout is not None
        return self._layout.split(buffer)

    def _broadcast(self, tensor: Tensor, seconds: float) -> Tensor:
        """Return a tensor of the root, on the host."""
        moved = tensor.to(self._device)
        work = dist.broadcast(moved, src=self._source, group=self._group, async_op=True)
        _wait(work, seconds, f"rank {self._rank}: ranks that share batches of rank {self._root}")
        return moved.cpu()


def process_group(given: Any) -> Any:
    """Return a process group, also of a one-dimensional ``DeviceMesh``.

    Raises ConfigError for anything else, or where ``torch.distributed`` is not initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "connect(group=)",
            got=f"{type(given).__name__}, without torch.distributed",
            limit="a group of torch.distributed",
            remedy="Call torch.distributed.init_process_group first.",
        )
    is_mesh = hasattr(given, "get_group") and getattr(given, "ndim", None) == 1
    group = given.get_group() if is_mesh else given
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            "connect(group=)",
            got=repr(given),
            limit="a process group that this rank belongs to, or a DeviceMesh of one dimension",
        )
    return group


def _device(group: Any) -> torch.device:
    """Return where tensors of a group have to lie: on the host if it can do that."""
    if "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _wait(work: Any, seconds: float, what: str) -> None:
    try:
        done = work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise DeadlineError(
            f"waited too long for {what}",
            got=str(error).splitlines()[0],
            limit=f"{seconds:g} s, or the timeout of the group",
            remedy="Every rank of the group takes every microbatch; see what its others do.",
        ) from error
    if done is False:
        raise DeadlineError(f"waited too long for {what}", limit=f"{seconds:g} s")
