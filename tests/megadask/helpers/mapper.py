"""A rank without torch: ``python -m tests.megadask.helpers.mapper ADDRESS NAME RANK``.

Takes two batches, says so, and answers lines of its input by one of JSON: the first batch's memory,
by the kernel's account, and a hash of it. ``next`` takes another batch first.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from distributed import Client

from megadask.scheduling.delivery import Microbatch
from megadask.scheduling.trainer_link import TrainerLink


def mappings(process: int | str = "self") -> list[dict[str, int]]:
    """Return inode, descriptor and kilobytes of every mapping of shared memory of MegaDask."""
    found: list[dict[str, int]] = []
    is_ours = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = "/memfd:megadask-" in line
            if is_ours:
                found.append({"inode": int(line.split()[4])})
        elif is_ours:
            name, value = line.split()[:2]
            if name in ("Pss:", "Rss:"):
                found[-1][name[:3]] = int(value)
    return found


def digest(microbatch: Microbatch) -> str:
    made = hashlib.blake2b(digest_size=16)
    for name, array in sorted(microbatch.arrays.items()):
        made.update(name.encode() + array.tobytes())
    return made.hexdigest()


def main() -> None:
    address, name, rank = sys.argv[1:]
    with Client(address, direct_to_workers=True, set_as_default=False) as client:
        options: dict[str, Any] = {"timeout_s": 40.0, "prefetch": 1, "keys": None, "force": True}
        link = TrainerLink(client, name, int(rank), **options)
        kept = [link.read(), link.read()]
        print("reading", flush=True)
        for line in sys.stdin:
            if line.startswith("next"):
                link.consume(link.position)
                kept.append(link.read())
            if line.startswith("close"):
                link.close()
            assert kept[0] is not None
            told = {"maps": mappings(), "digest": digest(kept[0]), "stats": link.stats()}
            print("told", json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
