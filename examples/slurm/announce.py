"""How trainers find the service: by a Dask scheduler file."""

from __future__ import annotations

import json
import os
from pathlib import Path


def announce(address: str, folder: Path) -> None:
    """Write the scheduler file, whole or not at all.

    Not by ``Client.write_scheduler_file``: what that adds about workers that are busy is not
    always JSON.
    """
    written = folder / "scheduler.new"
    written.write_text(json.dumps({"address": address}))
    os.replace(written, folder / "scheduler.json")
