"""The process group of the demo's trainers, on the loopback interface alone."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed

from megadask.planner.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which trainer this process is, as its environment says.

    Parameters
    ----------
    rank, world_size
        This rank of how many.
    port
        Where rank 0 keeps the store through which the ranks find each other, on the loopback
        interface.
    """

    rank: int
    world_size: int
    port: int

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Placement:
        """Read the variables that ``torchrun`` sets, too."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in env]
        if missing:
            raise ConfigError(
                "the environment of a trainer", got=f"no {', '.join(missing)}", limit=names
            )
        if env["MASTER_ADDR"] not in ("127.0.0.1", "localhost"):
            raise ConfigError(
                "MASTER_ADDR",
                got=env["MASTER_ADDR"],
                limit="127.0.0.1: all trainers of the demo run on one machine",
            )
        return cls(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            port=int(env["MASTER_PORT"]),
        )


def join_group(placement: Placement, *, timeout_s: float) -> None:
    """Enter the process group; no socket of it can be reached from other machines."""
    timeout = timedelta(seconds=timeout_s)
    is_master = placement.rank == 0
    # The store binds to all interfaces by itself, so it gets a socket that does not.
    listener = socket.create_server(("127.0.0.1", placement.port)) if is_master else None
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        placement.port,
        placement.world_size,
        is_master=is_master,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    distributed.init_process_group(
        "gloo",
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timeout,
    )
