"""The 1F1B schedule of a pipeline whose microbatches are not alike.

Axes: B pipelines, M microbatches, S stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """When every stage of every pipeline is done with the passes of every microbatch.

    Attributes
    ----------
    forward_SMB, backward_SMB
        (S, M, B) float64, when the forward and the backward pass end, from 0.
    forward_BM, backward_BM
        (B, M) float64, how long the passes take on each stage.
    """

    forward_SMB: Floats
    backward_SMB: Floats
    forward_BM: Floats
    backward_BM: Floats

    @property
    def end_B(self) -> Floats:
        """(B,) when each pipeline has ended: after the last backward pass of the first stage."""
        if not self.backward_SMB.shape[1]:
            return np.zeros(self.backward_SMB.shape[2])
        return np.asarray(self.backward_SMB[0, -1])


def one_forward_one_backward(load_BM: Floats, num_stages: int, backward: float) -> Timeline:
    """Run B pipelines of equal stages, each by the 1F1B schedule (Narayanan et al., SC 2021).

    Stage s begins with min(S - 1 - s, M) forward passes, then alternates one forward and one
    backward pass, and ends with the backward passes that are left. A pass begins when its stage is
    free and the pass that it continues has ended: the forward pass of the stage before, the
    backward pass of the stage behind. Sending costs nothing.

    Parameters
    ----------
    load_BM
        (B, M) >= 0, time of each microbatch on all stages together; not modified.
    num_stages
        S >= 1; every stage does 1 / S of a microbatch.
    backward
        Time of a backward pass over that of its forward pass.
    """
    num_pipelines, num_microbatches = load_BM.shape
    share_BM = load_BM / num_stages
    forward_BM = share_BM / (1 + backward)
    backward_BM = share_BM - forward_BM
    forward_SMB = np.zeros((num_stages, num_microbatches, num_pipelines))
    backward_SMB = np.zeros_like(forward_SMB)
    free_SB = np.zeros((num_stages, num_pipelines))
    for stage, is_backward, micro in passes(num_stages, num_microbatches):
        ready_B = free_SB[stage]
        if is_backward and stage < num_stages - 1:
            ready_B = np.maximum(ready_B, backward_SMB[stage + 1, micro])
        elif not is_backward and stage:
            ready_B = np.maximum(ready_B, forward_SMB[stage - 1, micro])
        ends_SMB, time_BM = (
            (backward_SMB, backward_BM) if is_backward else (forward_SMB, forward_BM)
        )
        free_SB[stage] = ends_SMB[stage, micro] = ready_B + time_BM[:, micro]
    return Timeline(
        forward_SMB=forward_SMB,
        backward_SMB=backward_SMB,
        forward_BM=forward_BM,
        backward_BM=backward_BM,
    )


def passes(num_stages: int, num_microbatches: int) -> list[tuple[int, bool, int]]:
    """Return (stage, is backward, microbatch) of all passes, each behind those it waits for."""
    queues = [_queue(num_stages, num_microbatches, stage) for stage in range(num_stages)]
    done = {False: [0] * num_stages, True: [0] * num_stages}
    at = [0] * num_stages
    order: list[tuple[int, bool, int]] = []
    while len(order) < 2 * num_stages * num_microbatches:
        for stage, queue in enumerate(queues):
            while at[stage] < len(queue):
                is_backward, micro = queue[at[stage]]
                before = stage + 1 if is_backward else stage - 1
                if 0 <= before < num_stages and done[is_backward][before] <= micro:
                    break
                order.append((stage, is_backward, micro))
                done[is_backward][stage] += 1
                at[stage] += 1
    return order


def _queue(num_stages: int, num_microbatches: int, stage: int) -> list[tuple[bool, int]]:
    """Return (is backward, microbatch) of the passes of one stage in their order."""
    ahead = min(num_stages - 1 - stage, num_microbatches)
    queue = [(False, micro) for micro in range(ahead)]
    for micro in range(num_microbatches - ahead):
        queue += [(False, ahead + micro), (True, micro)]
    return queue + [(True, micro) for micro in range(num_microbatches - ahead, num_microbatches)]
