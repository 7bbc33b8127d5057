"""Segments of shared memory: found only by who knows them, private to who maps them."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from megadask.scheduling import segment
from megadask.scheduling.ring import Ring
from megadask.scheduling.segment import GoneError, Segment, host_identity, map_segment
from megadask.scheduling.share import IDS, Share, arrays_in, parts_of
from tests.megadask.helpers.opened import open_files

pytestmark = pytest.mark.skipif(host_identity() is None, reason="needs memfd and /proc")

MIB = 2**20


def mapped(one: Segment, name: str = "") -> np.ndarray:
    where = (os.getpid(), one.number, name or one.name, one.inode)
    return np.frombuffer(map_segment(*where, MIB, [(0, MIB)]), np.uint8)


def num_open() -> int:
    return sum(link.startswith("/memfd:megadask") for link in open_files())


def test_what_is_written_to_a_mapping_nobody_else_sees() -> None:
    one = Segment(MIB)
    one.bytes[:] = 1
    first, second = mapped(one), mapped(one)
    first[:] = 2
    assert (one.bytes == 1).all()
    assert (second == 1).all()


FORKED = """
import os, sys
import numpy as np
from megadask.scheduling import segment

segment._POPULATE_WRITE = int(sys.argv[1])
one = segment.Segment(2**20)
one.bytes[:] = 1
where = (os.getpid(), one.number, one.name, one.inode)
mapped = segment.map_segment(*where, 2**20, [(0, 2**20)])
gone = segment.map_segment(*where, 2**20, [(0, 2**20)])
gone.close()
mapped[7] = 5
written, told = os.pipe()
child = os.fork()
if not child:
    os.read(written, 1)
    array = np.frombuffer(mapped, np.uint8)
    os._exit(not (array[7] == 5 and array.sum() == 2**20 + 4))
one.bytes[:] = 2
os.write(told, b"x")
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("advice", [segment._POPULATE_WRITE, 999], ids=["kernel", "old kernel"])
def test_a_forked_child_has_a_copy(advice: int) -> None:
    """Its parent's segment is used again, and nobody knows of the child."""
    command = [sys.executable, "-c", FORKED, str(advice)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "0\n"


def test_a_mapping_outlives_the_segment() -> None:
    before = num_open()
    one = Segment(MIB)
    one.bytes[:] = 3
    kept = mapped(one)
    one.close()
    del one
    assert (kept == 3).all()
    del kept
    assert num_open() == before


def test_a_segment_that_is_dropped_is_closed() -> None:
    before = num_open()
    one = Segment(MIB)
    assert num_open() > before
    del one
    assert num_open() == before


def test_another_file_under_its_number_is_not_taken_for_it() -> None:
    one, other = Segment(MIB), Segment(MIB)
    with pytest.raises(GoneError, match="another file"):
        mapped(one, other.name)
    number = one.number
    one.close()
    with pytest.raises(GoneError):
        map_segment(os.getpid(), number, one.name, one.inode, MIB, [])


def test_a_process_that_is_gone_is_not_an_error_of_shared_memory() -> None:
    with pytest.raises(GoneError, match="gone"):
        map_segment(2**22 + 1, 3, "megadask", 1, MIB, [])  # above any process id


def test_a_system_without_memory_leaves_the_share_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    ring, before = Ring(64 * MIB, 1), num_open()
    array = np.arange(1000)
    share = Share({0: {"tokens": array}}, {0: 0}, {0: ()})
    monkeypatch.setattr(segment.os, "posix_fallocate", is_full)
    assert not ring.place(share)
    monkeypatch.undo()
    assert not ring.place(share)  # it does not try again and again
    assert share.content is None
    assert share.arrays_of[0]["tokens"] is array
    assert (num_open(), ring.status()["shared_bytes"]) == (before, 0)


def test_arrays_of_all_kinds_come_back_as_they_were() -> None:
    common = {"max_seqlen": np.array(7), IDS: np.zeros((6, 0), np.int64), "mask": np.eye(3) > 0}
    layouts = [
        {**common, "tokens": np.arange(10_000, dtype=np.int32).reshape(2, -1) + rank}
        for rank in range(2)
    ]
    share = Share(dict(enumerate(layouts)), {0: 0, 1: 0}, {0: (), 1: ()})
    one = Segment(MIB)
    share.move(one.bytes[: share.laid_out_bytes], 1)
    for rank, layout in enumerate(layouts):
        told = share.where(rank, tuple(layout))
        found = arrays_in(one.bytes, told)
        for name, array in layout.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(found[name], array)
        assert share.arrays_of[0]["mask"] is share.arrays_of[1]["mask"]
    first, second = (parts_of(share.where(rank, tuple(common))) for rank in range(2))
    assert first == second
    assert first[-1][1] <= 4096  # what all ranks have lies together
