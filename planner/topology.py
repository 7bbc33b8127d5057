"""Where the ranks of a training job stand: which get the same data, which get slices of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megadask.planner.errors import ConfigError

#: Axes of parallelism: pipeline, data, context, tensor.
AXES = ("pp", "dp", "cp", "tp")

#: An axis, several that are distributed over together, or all ranks apart ("world").
Axis = str | tuple[str, ...]

#: Names under which frameworks split the data axis over several mesh dimensions.
_DATA_NAMES = ("dp", "ddp", "fsdp", "dp_replicate", "dp_shard", "replicate", "shard")


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
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(
                    f"ClientPlaceTree({axis}=)", got=repr(size), limit="an integer >= 1"
                )
        object.__setattr__(self, "order", tuple(self.order))
        if sorted(self.order) != sorted(AXES):
            raise ConfigError(
                "ClientPlaceTree(order=)", got=self.order, limit=f"an order of {AXES}"
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

    def num_slices(self, axis: Axis) -> int:
        """Return how many slices of its sequences the ranks of one bucket take between them.

        That is cp, or 1 where it is distributed over: then every cp rank has sequences of its own.
        """
        return 1 if "cp" in self.axes(axis) else self.cp

    def bucket_of(self, rank: int, axis: Axis) -> int:
        """Return the bucket that a rank consumes. Those of several axes are numbered in `order`."""
        self._check_rank(rank)
        return int(self._bucket_R(axis)[rank])

    def ranks_of(self, bucket: int, axis: Axis) -> list[int]:
        """Return the ranks that consume a bucket, rising."""
        num_buckets = self.num_buckets(axis)
        if not 0 <= bucket < num_buckets:
            raise ConfigError(f"bucket along {axis!r}", got=bucket, limit=f"0 to {num_buckets - 1}")
        return [int(rank) for rank in np.flatnonzero(self._bucket_R(axis) == bucket)]

    def cp_slice(self, rank: int) -> tuple[int, int]:
        """Return (index, of): which of how many slices of a sequence a rank takes."""
        return self.coords(rank)["cp"], self.cp

    def delivery(self, rank: int, broadcast_axes: Sequence[str]) -> Literal["payload", "broadcast"]:
        """Return whether a rank fetches its data, or gets it by broadcast from the trainers' group.

        The first rank along all ``broadcast_axes`` fetches.
        """
        coords = self.coords(rank)
        axes = self.axes(tuple(broadcast_axes)) if broadcast_axes else ()
        return "broadcast" if any(coords[axis] for axis in axes) else "payload"

    def axes(self, axis: Axis) -> tuple[str, ...]:
        """Return the axes that a word or a tuple names, in `order`.

        Raises ConfigError for anything else than distinct axes or ``"world"``.
        """
        if axis == "world":
            return self.order
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
            Variables to read, those of this process by default: WORLD_SIZE, else SLURM_NTASKS; the
            rank of this process (RANK, else SLURM_PROCID) must be one of the job's, if it is set.
        order
            As in `ClientPlaceTree`.
        **sizes
            Sizes of the other axes, and of dp to have it checked.
        """
        unknown = sorted(set(sizes) - set(AXES))
        if unknown:
            raise ConfigError("ClientPlaceTree.from_env: axis", got=unknown, limit=f"among {AXES}")
        variables = os.environ if environ is None else environ
        world_size = _variable(variables, "WORLD_SIZE", "SLURM_NTASKS")
        if world_size is None:
            raise ConfigError(
                "the number of ranks is not in the environment",
                limit="WORLD_SIZE or SLURM_NTASKS",
                remedy="Start with torchrun or srun, or give ClientPlaceTree its sizes.",
            )
        fixed = cls(**{"dp": 1, **sizes}, order=order)
        dp, rest = divmod(world_size, fixed.world_size)
        if "dp" in sizes:
            rest, dp = abs(world_size - fixed.world_size), fixed.dp
        if rest or not dp:
            named = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
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
    def from_device_mesh(cls, mesh: Any) -> ClientPlaceTree:
        """Return the topology of a torch ``DeviceMesh``: has ``mesh_dim_names`` and ``shape``.

        Dimensions such as "dp_replicate" and "dp_shard" make up dp together if they are neighbours.
        Raises ConfigError for dimensions that have no axis here, and for meshes whose ranks do not
        count up.
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
                    remedy="Give ClientPlaceTree its sizes and order.",
                )
            sizes[axis] = sizes.get(axis, 1) * size
            last = axis
        return cls(**sizes, order=_order(tuple(sizes)))

    def describe(self) -> str:
        """Return a text that shows the axes and, for small jobs, every rank."""
        axes = " x ".join(
            f"{axis} {size}" for axis, size in zip(self.order, self.shape, strict=True)
        )
        lines = [f"{self.world_size} ranks = {axes} (outermost first)"]
        shown = min(self.world_size, 16)
        for rank in range(shown):
            coords = self.coords(rank)
            lines.append(
                f"  rank {rank}: " + " ".join(f"{axis}{at}" for axis, at in coords.items())
            )
        if shown < self.world_size:
            lines.append(f"  ... and {self.world_size - shown} more")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON form; see `from_dict`."""
        return {**asdict(self), "order": list(self.order)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ClientPlaceTree:
        """Invert `to_dict`."""
        unknown = sorted(set(data) - {*AXES, "order"})
        if unknown:
            raise ConfigError("ClientPlaceTree", got=unknown, limit=f"{AXES} and order")
        return cls(**{**data, "order": tuple(data.get("order", AXES))})

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError("rank", got=rank, limit=f"0 to {self.world_size - 1}")

    def _bucket_R(self, axis: Axis) -> NDArray[np.int64]:
        """(R,) the bucket of every rank."""
        coords = np.unravel_index(np.arange(self.world_size), self.shape)
        bucket_R = np.zeros(self.world_size, np.int64)
        for name in self.axes(axis):
            bucket_R = bucket_R * getattr(self, name) + coords[self.order.index(name)]
        return bucket_R


def _order(named: tuple[str, ...]) -> tuple[str, ...]:
    """Complete an order with the axes it lacks, which have one rank; `AXES` if it agrees."""
    if named == tuple(axis for axis in AXES if axis in named):
        return AXES
    return (*(axis for axis in AXES if axis not in named), *named)


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
