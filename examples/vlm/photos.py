"""Photographs with captions, and text without: what the example trains on, as Parquet files.

The photographs are those that scikit-image brings along; what is cut out of them is of very unlike
sizes, and its caption says what it is. The text is scikit-image's documentation.
"""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import skimage
from PIL import Image

#: Those that are part of the package; others would have to be fetched.
PHOTOS = {
    "an astronaut": "astronaut.png",
    "a cat": "chelsea.png",
    "a cup of coffee": "coffee.png",
    "coins": "coins.png",
    "galaxies": "hubble_deep_field.jpg",
    "a motorcycle": "motorcycle_left.png",
    "a retina": "retina.jpg",
    "a rocket": "rocket.jpg",
}
#: Height and width of what is cut out, in pixels: most are small, some large.
SMALLEST, LARGEST = 24, 400
#: Rows of a file: a shard of its source.
ROWS = 64


def write(folder: Path, num_photos: int, seed: int = 0) -> dict[str, str]:
    """Write both sources below a folder; return source to the glob that names its files."""
    photos = list(captioned(num_photos, np.random.default_rng(seed)))
    texts = [{"text": text} for text in documentation()]
    return {
        name: _write(folder / name, rows) for name, rows in (("photos", photos), ("docs", texts))
    }


def captioned(count: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Yield records of ``image``, the bytes of a JPEG, and ``text``, its caption with a marker."""
    folder = Path(skimage.__file__).parent / "data"
    opened = {name: Image.open(folder / file).convert("RGB") for name, file in PHOTOS.items()}
    for image in opened.values():
        image.thumbnail((640, 640))
    for _ in range(count):
        name = str(rng.choice(list(opened)))
        image = opened[name]
        low, high = np.log([SMALLEST, min(LARGEST, *image.size)])
        width, height = np.exp(rng.uniform(low, high, 2)).astype(int)
        left = int(rng.integers(0, image.width - width + 1))
        top = int(rng.integers(0, image.height - height + 1))
        across = "left" if left + width / 2 < image.width / 2 else "right"
        down = "top" if top + height / 2 < image.height / 2 else "bottom"
        data = io.BytesIO()
        image.crop((left, top, left + width, top + height)).save(data, "JPEG", quality=90)
        text = f"<image>This is a piece of a photo of {name}, from the {down} {across}."
        yield {"image": data.getvalue(), "text": text}


def documentation() -> Iterator[str]:
    """Yield the documentation of scikit-image's modules, functions and classes."""
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    for file in sorted(Path(skimage.__file__).parent.glob("*/*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and len(text) > 40:
                yield text


def _write(folder: Path, rows: list[dict[str, Any]]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, len(rows), ROWS)):
        table = pa.Table.from_pylist(rows[first : first + ROWS])
        pq.write_table(table, folder / f"{number:04}.parquet")
    return str(folder / "*.parquet")
