"""From a microbatch as it arrived to a dict of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megadask.planner.ids import SampleId
from megadask.scheduling.delivery import Microbatch
from megadask.scheduling.extras import decode
from megadask.scheduling.samples import EXTRAS
from megadask.trainer.presets import Batch


def to_batch(microbatch: Microbatch, sources: list[str], *, shared: bool = False) -> Batch:
    """Return a microbatch as a dict of tensors and facts; ids in pack order.

    shared: whether its arrays may be those of a constructor in this process: then they are copied.
    """
    batch: Batch = {}
    for name, array in microbatch.arrays.items():
        if name == EXTRAS:
            batch[name] = decode(array)
        else:
            batch[name] = _tensor(array, shared) if array.ndim else array.item()
    source, epoch, lane, position, start, stop = microbatch.ids
    columns = (column.tolist() for column in (source, epoch, lane, position))
    batch["sample_ids"] = [
        SampleId(sources[s], e, k, p) for s, e, k, p in zip(*columns, strict=True)
    ]
    batch["spans"] = _tensor(np.stack([start, stop], axis=1))
    batch["step"] = microbatch.step
    batch["microbatch"] = microbatch.microbatch
    batch["is_last"] = microbatch.is_last
    batch["num_loss_tokens"] = microbatch.num_loss_tokens
    batch["num_loss_tokens_step"] = microbatch.num_loss_tokens_step
    batch["cp_layout"] = microbatch.cp_layout
    return batch


def _tensor(array: NDArray[Any], shared: bool = False) -> torch.Tensor:
    """Return a tensor that owns its memory alone."""
    return torch.from_numpy(array.copy() if shared or not array.flags.writeable else array)
