"""Shared memory of the host: segments that a process makes, and that others map by themselves.

A segment is a memfd: it has no name in any folder, and ends with the last process that has it open
or mapped, whatever they die of. Others open it through ``/proc`` by the maker's process id and the
number of its descriptor; its own name, which nobody guesses, tells that it is the one meant.
"""

from __future__ import annotations

import logging
import mmap
import os
import uuid
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

#: Of Linux 5.14, ``MADV_POPULATE_READ`` and ``_WRITE``: map pages ahead of their use.
_POPULATE_READ, _POPULATE_WRITE = 22, 23

#: What is mapped here, by its number.
_mapped: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
_numbers = count()


class GoneError(OSError):
    """The segment, or the process that made it, is there no more."""


class Segment:
    """A piece of shared memory of this process, written once so that its pages are there.

    Parameters
    ----------
    num_bytes
        Its size.

    Raises
    ------
    OSError
        There is no memory, or no descriptor, to be had.
    """

    def __init__(self, num_bytes: int) -> None:
        self.name = f"megadask-{uuid.uuid4().hex}"
        self.number = os.memfd_create(self.name)
        try:
            # Not ftruncate: memory that is missing is an error here, and a fatal signal later.
            os.posix_fallocate(self.number, 0, num_bytes)
            mapped = mmap.mmap(self.number, num_bytes)
        except BaseException:
            os.close(self.number)
            raise
        self.inode = os.fstat(self.number).st_ino
        self.bytes: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)
        #: Lets go of it, once; its memory stays as long as somebody has it mapped.
        self.close = weakref.finalize(self, os.close, self.number)


def map_segment(
    process: int,
    number: int,
    name: str,
    inode: int,
    size: int,
    parts: Iterable[tuple[int, int]],
) -> mmap.mmap:
    """Return a segment as private memory: what is written to it nobody else sees.

    Where this process is forked, the child has a copy.

    Parameters
    ----------
    process, number, name, inode
        Who made it, and how it is told from others.
    size
        How much of it to map, in bytes.
    parts
        First byte and end of what will be read.

    Raises
    ------
    GoneError
        It is there no more.
    OSError
        It cannot be opened or mapped.
    """
    path = f"/proc/{process}/fd/{number}"
    try:
        if os.readlink(path) != f"/memfd:{name} (deleted)":  # first, as opening may have effects
            raise GoneError(f"{path} is another file")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise GoneError(f"{path} is gone") from error
    try:
        if os.fstat(descriptor).st_ino != inode:
            raise GoneError(f"{path} is another file")
        mapped = mmap.mmap(
            descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        )
    finally:
        os.close(descriptor)
    _populate(mapped, parts)
    _watch_forks()
    _mapped[next(_numbers)] = mapped
    return mapped


@cache
def _watch_forks() -> None:
    """Do what there is to do before each fork of this process."""
    os.register_at_fork(before=_copy_mapped)


def _copy_mapped() -> None:
    """Let no page of what is mapped be that of the segment any more.

    Its maker does not know of a child, and writes the next batch there once this process needs the
    last one no longer. Pages that were copied a child has for itself, as all other memory.
    """
    for mapped in [ref() for ref in _mapped.valuerefs()]:
        with suppress(ValueError):  # it was closed meanwhile
            if mapped is not None:
                _write(mapped)


def _write(mapped: mmap.mmap) -> None:
    try:
        mapped.madvise(_POPULATE_WRITE)
    except OSError:  # an older kernel
        for first in range(0, len(mapped), mmap.PAGESIZE):
            mapped[first] = mapped[first]


def _populate(mapped: mmap.mmap, parts: Iterable[tuple[int, int]]) -> None:
    """Map the pages of some parts at once, where the kernel can; else they come one by one."""
    page = mmap.PAGESIZE
    try:
        for first, end in parts:
            start = first // page * page
            mapped.madvise(_POPULATE_READ, start, end - start)
    except OSError as error:
        logger.debug("no pages ahead: %s", error)


@cache
def host_identity() -> str | None:
    """Return a name that two processes have in common if they can map each other's segments.

    None where there are none: not on Linux, or without ``/proc``.
    """
    if not hasattr(os, "memfd_create"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return None
