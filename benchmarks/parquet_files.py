"""Parquet files as training data tends to be: 38 columns, two texts, an image, 35 short ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROW_GROUP_ROWS = 1000
NUM_ROW_GROUPS = 30
NUM_NUMBERS, NUM_NAMES = 28, 7
#: Means of exponential distributions.
TEXT_BYTES, CAPTION_BYTES, IMAGE_BYTES = 800, 150, 25_000

NAMES = [f"name{i}" for i in range(NUM_NAMES)]

#: Title to options of the writer.
LAYOUTS: dict[str, dict[str, Any]] = {
    "pages of 64 kB, dictionaries for names only": {
        "use_dictionary": NAMES,
        "data_page_size": 64 * 1024,
        "write_batch_size": 16,
    },
    "as pyarrow writes by default": {},
}


def table() -> pa.Table:
    """Return the rows of one row group."""
    rng = np.random.default_rng(0)
    words = [rng.bytes(4).hex() for _ in range(5000)]

    def texts(mean_bytes: int) -> list[str]:
        lengths = rng.exponential(mean_bytes, ROW_GROUP_ROWS).astype(int) // 9
        return [" ".join(words[i] for i in rng.integers(len(words), size=n)) for n in lengths]

    images = rng.exponential(IMAGE_BYTES, ROW_GROUP_ROWS).astype(int)
    columns: dict[str, Any] = {
        "text": texts(TEXT_BYTES),
        "caption": texts(CAPTION_BYTES),
        "image": [rng.bytes(n) for n in images.tolist()],
    }
    columns |= {f"number{i}": rng.normal(size=ROW_GROUP_ROWS) for i in range(NUM_NUMBERS)}
    columns |= {name: [words[i] for i in rng.integers(50, size=ROW_GROUP_ROWS)] for name in NAMES}
    return pa.table(columns)


def write(path: Path, num_row_groups: int = NUM_ROW_GROUPS, **options: Any) -> str:
    """Write a file, and return what is in it."""
    rows = table()
    with pq.ParquetWriter(path, rows.schema, **options) as writer:
        for _ in range(num_row_groups):
            writer.write_table(rows)
    metadata = pq.read_metadata(path)
    return (
        f"{metadata.num_columns} columns, {metadata.num_row_groups} row groups of "
        f"{metadata.row_group(0).total_byte_size / 1e6:.0f} MB, "
        f"footer of {metadata.serialized_size / 1e6:.2f} MB"
    )
