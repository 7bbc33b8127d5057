"""Where the ranks of a training job stand: which get the same data, which get slices of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megadask.planner.checks import check_integer
from megadask.planner.errors import ConfigError
from megadask.planner.meshtree import html_tree, text_tree

#: Axes of parallelism: pipeline, data, context, tensor.
AXES = ("pp", "dp", "cp", "tp")

#: Sizes of expert parallelism, which divides ranks of these axes anew and adds none.
EXPERT_SIZES = ("ep", "etp")

#: Most ranks of a job.
MOST_RANKS = 2**20

#: An axis, several that are distributed over together, or all ranks apart ("world").
Axis = str | tuple[str, ...]

#: Names under which frameworks split the data axis over several mesh dimensions.
_DATA_NAMES = (
    *("dp", "ddp", "fsdp", "batch", "replicate", "shard"),
    *("dp_replicate", "dp_shard", "dp_shard_mod_ep", "dp_shard_in_ep"),
)

#: Where a launcher says how many ranks there are, the most particular first.
_WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS")

#: How a rank comes by a microbatch: see `ClientPlaceTree.delivery`.
Delivery = Literal["payload", "broadcast", "shapes"]


@dataclass(frozen=True)
class ClientPlaceTree:
    """Sizes and order of the axes that the ranks of a job are laid out along.

    Parameters
    ----------
    dp, pp, cp, tp
        Ranks along the data, pipeline, context and tensor axis.
    order
        The axes from the outermost to the innermost: neighbouring ranks differ in the last one. The
        default is that of Megatron-LM (there "tp-cp-dp-pp", the fastest first).
    ep, etp
        Expert parallelism: the dp x cp x tp ranks of a pipeline stage, in the order of their
        numbers, are divided anew into blocks of ep x etp ranks, etp the fastest, as in
        Megatron-Core. Neighbours along ep hold different experts, those along etp slices of the
        same. They change nothing about data. Megatron's own default is etp = tp.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, *EXPERT_SIZES):
            size = getattr(self, axis)
            if isinstance(size, np.integer):
                size = int(size)
                object.__setattr__(self, axis, size)
            check_integer(f"ClientPlaceTree({axis}=)", size, 1)
        object.__setattr__(self, "order", tuple(self.order))
        if sorted(self.order) != sorted(AXES):
            raise ConfigError(
                "ClientPlaceTree(order=)", got=self.order, limit=f"an order of {AXES}"
            )
        if self.world_size > MOST_RANKS:
            raise ConfigError(
                "ranks of a ClientPlaceTree", got=self.world_size, limit=f"at most {MOST_RANKS}"
            )
        stage = self.world_size // self.pp
        if stage % (self.ep * self.etp):
            raise ConfigError(
                f"ClientPlaceTree(ep={self.ep}, etp={self.etp})",
                got=f"blocks of {self.ep * self.etp} ranks",
                limit=f"a divisor of dp x cp x tp = {stage}, the ranks of a pipeline stage",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes in `order`."""
        return tuple(getattr(self, axis) for axis in self.order)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    def coords(self, rank: int) -> dict[str, int]:
        """Return the place of a rank along every axis."""
        self._check_rank(rank)
        return dict(zip(self.order, map(int, np.unravel_index(rank, self.shape)), strict=True))

    def num_buckets(self, axis: Axis) -> int:
        """Return how many consumers get data of their own when it is distributed along an axis."""
        return prod(getattr(self, name) for name in self.axes(axis))

    def bucket_of(self, rank: int, axis: Axis) -> int:
        """Return the bucket that a rank consumes. Those of several axes are numbered in `order`."""
        self._check_rank(rank)
        return int(self._bucket_R(axis)[rank])

    def ranks_of(self, bucket: int, axis: Axis) -> list[int]:
        """Return the ranks that consume a bucket, rising."""
        num_buckets = self.num_buckets(axis)
        if not 0 <= bucket < num_buckets:
            raise ConfigError(f"bucket along {axis!r}", got=bucket, limit=f"0 to {num_buckets - 1}")
        return list(_ranks(self, self.axes(axis))[bucket])

    def cp_slice(self, rank: int) -> tuple[int, int]:
        """Return (index, of): which of how many slices of a sequence a rank takes."""
        return self.coords(rank)["cp"], self.cp

    def num_slices(self, axis: Axis) -> int:
        """Return how many slices of its sequences the ranks of one bucket take between them.

        That is cp, or 1 where it is distributed over: then every cp rank has sequences of its own.
        """
        return 1 if "cp" in self.axes(axis) else self.cp

    def delivery(
        self, rank: int, broadcast_axes: Sequence[str] = (), axis: Axis = "dp"
    ) -> Delivery:
        """Return how a rank comes by the microbatches of its bucket.

        ``"payload"`` it fetches the tensors; ``"broadcast"`` another trainer, its
        `broadcast_root`, does and passes them on; ``"shapes"`` it needs none, only where documents
        begin and end: a pipeline stage between the first, which needs tokens, and the last, which
        needs labels. A stage between them that has buckets of its own fetches, and one whose data
        is broadcast along "pp" gets it so.

        Parameters
        ----------
        broadcast_axes
            The first rank along all of them fetches.
        axis
            What buckets are for, as in `bucket_of`.
        """
        stage = self.coords(rank)["pp"]
        if 0 < stage < self.pp - 1 and "pp" not in (*broadcast_axes, *self.axes(axis)):
            return "shapes"
        return "payload" if self.broadcast_root(rank, broadcast_axes) == rank else "broadcast"

    def broadcast_root(self, rank: int, broadcast_axes: Sequence[str]) -> int:
        """Return the first rank along these axes, which fetches for this one."""
        coords = self.coords(rank)
        axes = self.axes(tuple(broadcast_axes)) if broadcast_axes else ()
        root = [0 if axis in axes else coords[axis] for axis in self.order]
        return int(np.ravel_multi_index(root, self.shape))

    def expert_group(self, rank: int) -> list[int]:
        """Return the ranks that between them hold all experts of this rank's layers, rising."""
        self._check_rank(rank)
        stage_R = self._bucket_R("pp")
        ranks = np.flatnonzero(stage_R == stage_R[rank])
        blocks = ranks.reshape(-1, self.ep, self.etp)
        block, _, slice_of_expert = np.argwhere(blocks == rank)[0]
        return [int(other) for other in blocks[block, :, slice_of_expert]]

    def axes(self, axis: Axis) -> tuple[str, ...]:
        """Return the axes that a word or a tuple names, in `order`.

        Raises ConfigError for anything else than distinct axes or ``"world"``.
        """
        if axis == "world":
            return self.order
        if not isinstance(axis, str | tuple | list):
            raise ConfigError("axis", got=repr(axis), limit=f'one or several of {AXES}, or "world"')
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        unknown = [name for name in names if name not in AXES]
        if unknown or not names or len(set(names)) < len(names):
            got = repr(unknown[0]) if unknown else repr(axis)
            raise ConfigError("axis", got=got, limit=f'one or several of {AXES}, or "world"')
        return tuple(name for name in self.order if name in names)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        order: tuple[str, ...] = AXES,
        **sizes: int,
    ) -> ClientPlaceTree:
        """Return the topology of this job, with dp deduced from the number of its ranks.

        Parameters
        ----------
        environ
            Variables to read, those of this process by default. The number of ranks is WORLD_SIZE
            (torchrun), else SLURM_NTASKS or its kin, else the tasks of every node by
            SLURM_TASKS_PER_NODE or SLURM_NTASKS_PER_NODE and SLURM_NNODES; the rank of this process
            (RANK, else SLURM_PROCID) must be one of the job's, if it is set.
        order
            As in `ClientPlaceTree`.
        **sizes
            Sizes of the other axes, of expert parallelism, and of dp to have it checked.
        """
        allowed = (*AXES, *EXPERT_SIZES)
        unknown = sorted(set(sizes) - set(allowed))
        if unknown:
            raise ConfigError(
                "ClientPlaceTree.from_env: axis", got=unknown, limit=f"among {allowed}"
            )
        variables = os.environ if environ is None else environ
        world_size = _num_ranks(variables)
        if world_size is None:
            raise ConfigError(
                "the number of ranks is not in the environment",
                limit=f"one of {', '.join(_WORLD_SIZE)}, SLURM_TASKS_PER_NODE",
                remedy="Start with torchrun or srun, or give ClientPlaceTree its sizes.",
            )
        along_axes = {axis: size for axis, size in sizes.items() if axis in AXES}
        fixed = cls(**{"dp": 1, **along_axes}, order=order)
        dp, rest = divmod(world_size, fixed.world_size)
        if "dp" in sizes:
            rest, dp = abs(world_size - fixed.world_size), fixed.dp
        if rest or not dp:
            named = ", ".join(f"{axis}={size}" for axis, size in along_axes.items())
            raise ConfigError(
                f"the sizes {named} do not make up the job",
                got=f"{world_size} ranks",
                limit=fixed.world_size if "dp" in sizes else f"a multiple of {fixed.world_size}",
            )
        tree = cls(**{**sizes, "dp": dp}, order=order)
        rank = _variable(variables, "RANK", "SLURM_PROCID")
        if rank is not None:
            tree._check_rank(rank)
        return tree

    @classmethod
    def from_device_mesh(cls, mesh: Any, *, ep: int = 1, etp: int = 1) -> ClientPlaceTree:
        """Return the topology of a torch ``DeviceMesh``: has ``mesh_dim_names`` and ``shape``.

        Dimensions such as "dp_replicate" and "dp_shard" make up dp together if they are neighbours.
        Pass the mesh that data is loaded by: where one dimension stands for dp and cp together, as
        "fsdp" does in some meshes for parameters, nobody can tell them apart.
        Raises ConfigError for dimensions that have no axis here, and for meshes whose ranks do not
        count up.

        Parameters
        ----------
        mesh
            The mesh of the whole job.
        ep, etp
            As in `ClientPlaceTree`; experts have a mesh of their own over the same ranks.
        """
        names, shape = mesh.mesh_dim_names, tuple(int(size) for size in mesh.shape)
        if not names or len(names) != len(shape):
            raise ConfigError(
                "from_device_mesh: names of the dimensions",
                got=names,
                limit=f"one for each of {shape}",
                remedy="Give init_device_mesh its mesh_dim_names.",
            )
        ranks = getattr(mesh, "mesh", None)
        if ranks is not None and ranks.flatten().tolist() != list(range(prod(shape))):
            raise ConfigError(
                "from_device_mesh: ranks of the mesh",
                got=ranks.tolist(),
                limit="all ranks from 0, counting up",
                remedy="Pass the mesh of the whole job.",
            )
        # Dimensions of one rank have no say.
        sizes: dict[str, int] = {}
        last = None
        for name, size in zip(names, shape, strict=True):
            axis = "dp" if name in _DATA_NAMES else name
            if size == 1:
                continue
            if axis not in AXES or (axis in sizes and axis != last):
                raise ConfigError(
                    f"from_device_mesh: dimension {name!r} of {tuple(names)}",
                    got=f"size {size}",
                    limit=f"axes among {AXES}, or neighbours among {_DATA_NAMES}",
                    remedy="Pass the mesh that data is loaded by, with ep= beside it; or give "
                    "ClientPlaceTree its sizes and order.",
                )
            sizes[axis] = sizes.get(axis, 1) * size
            last = axis
        return cls(**sizes, order=_order(tuple(sizes)), ep=ep, etp=etp)

    def describe(self, axis: Axis = "dp", broadcast_axes: Sequence[str] = ()) -> str:
        """Return the tree as text: who shares a bucket, takes which slice, fetches or does not.

        Every rank of a small job; of a large one what repeats itself is left out.

        Parameters
        ----------
        axis, broadcast_axes
            As in `delivery`.
        """
        return text_tree(self, axis, broadcast_axes)

    def _repr_html_(self) -> str:
        return html_tree(self, "dp", ())

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON form; see `from_dict`."""
        return {**asdict(self), "order": list(self.order)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClientPlaceTree:
        """Invert `to_dict`."""
        known = (*AXES, *EXPERT_SIZES, "order")
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise ConfigError("ClientPlaceTree", got=unknown, limit=f"among {known}")
        return cls(**{**data, "order": tuple(data.get("order", AXES))})

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError("rank", got=rank, limit=f"0 to {self.world_size - 1}")

    def _bucket_R(self, axis: Axis) -> NDArray[np.int64]:
        """(R,) the bucket of every rank."""
        return _buckets(self, self.axes(axis))


@lru_cache(maxsize=64)
def _ranks(tree: ClientPlaceTree, axes: tuple[str, ...]) -> list[list[int]]:
    """Return the ranks of every bucket along some axes, rising."""
    bucket_R = _buckets(tree, axes)
    order_R = np.argsort(bucket_R, kind="stable")
    ends = np.cumsum(np.bincount(bucket_R))[:-1]
    return [ranks.tolist() for ranks in np.split(order_R, ends)]


@lru_cache(maxsize=64)
def _buckets(tree: ClientPlaceTree, axes: tuple[str, ...]) -> NDArray[np.int64]:
    """(R,) the bucket of every rank along some axes; asked for with every call about a rank."""
    coords = np.unravel_index(np.arange(tree.world_size), tree.shape)
    bucket_R = np.zeros(tree.world_size, np.int64)
    for name in axes:
        bucket_R = bucket_R * getattr(tree, name) + coords[tree.order.index(name)]
    bucket_R.flags.writeable = False
    return bucket_R


def _order(named: tuple[str, ...]) -> tuple[str, ...]:
    """Complete an order with the axes it lacks, which have one rank; `AXES` if it agrees."""
    if named == tuple(axis for axis in AXES if axis in named):
        return AXES
    return (*(axis for axis in AXES if axis not in named), *named)


def _num_ranks(environ: Mapping[str, str]) -> int | None:
    """Return how many ranks the launcher says there are, or starts on all nodes together."""
    total = _variable(environ, *_WORLD_SIZE)
    if total is not None:
        return total
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if text := environ.get(name):
            runs = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
            if not all(runs):
                raise ConfigError(f"variable {name}", got=text, limit='counts such as "8(x3),4"')
            return sum(int(run[1]) * int(run[2] or 1) for run in runs if run)
    count_per_node = _variable(environ, "SLURM_NTASKS_PER_NODE")
    num_nodes = _variable(environ, "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return None if count_per_node is None or num_nodes is None else count_per_node * num_nodes


def _variable(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is set."""
    for name in names:
        if environ.get(name):
            try:
                return int(environ[name])
            except ValueError as error:
                raise ConfigError(
                    f"variable {name}", got=environ[name], limit="an integer"
                ) from error
    return None
