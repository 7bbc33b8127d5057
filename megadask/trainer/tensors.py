"""From a microbatch as it arrived to a dict of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megadask.planner.ids import SampleId
from megadask.scheduling.delivery import Microbatch
from megadask.scheduling.extras import decode
from megadask.scheduling.samples import EXTRAS
from megadask.scheduling.share import IDS
from megadask.trainer.presets import Batch


class Maker:
    """Makes batches of what arrives.

    Parameters
    ----------
    sources
        Names of the sources, by the numbers in ids.
    copies
        Whether arrays may be those of a constructor in this process: then they are copied.
    """

    def __init__(self, sources: list[str], *, copies: bool) -> None:
        self._sources = sources
        self._copies = copies

    def tensors(self, arrays: Mapping[str, NDArray[Any]], is_private: bool) -> Batch:
        """Return arrays as tensors and scalars, and their `IDS` as sample ids and spans.

        is_private: whether they are memory of this process alone, wherever the constructor is.
        """
        is_shared = self._copies and not is_private
        batch: Batch = {}
        for name, array in arrays.items():
            if name == EXTRAS:
                batch[name] = decode(array)
            elif name != IDS:
                batch[name] = _tensor(array, is_shared) if array.ndim else array.item()
        source, epoch, lane, position, start, stop = arrays[IDS]
        columns = (column.tolist() for column in (source, epoch, lane, position))
        batch["sample_ids"] = [
            SampleId(self._sources[s], e, k, p) for s, e, k, p in zip(*columns, strict=True)
        ]
        batch["spans"] = _tensor(np.stack([start, stop], axis=1))
        return batch

    def batch(self, microbatch: Microbatch) -> Batch:
        """Return a microbatch as a dict of tensors and facts; ids in pack order."""
        batch: Batch = microbatch.made
        if batch is None:
            arrays = {**microbatch.arrays, IDS: microbatch.ids}
            batch = self.tensors(arrays, microbatch.is_private)
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
