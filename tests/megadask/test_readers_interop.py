"""Our readers against the libraries whose formats they read, where those are installed.

None of them is part of the extra ``test``: they bring hundreds of MB with them. They are the
packages datasets, mosaicml-streaming and webdataset.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megadask.readers import HuggingFace, Mds, Tar
from tests.megadask.helpers.reader_cases import plain

pytestmark = [
    pytest.mark.timeout(120),
    # What other packages warn of is not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

ROWS: list[dict[str, Any]] = [
    {"text": f"document {i} {'grün ' * (i % 5)}", "number": i, "ids": list(range(i % 7 + 1))}
    for i in range(100)
]


def _all(reader: Any) -> list[Any]:
    return [plain(row) for i in range(len(reader.shards())) for row in reader.read(i)]


class TestHuggingFace:
    @pytest.fixture
    def datasets(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        found = pytest.importorskip("datasets")
        found.disable_progress_bars()
        return found

    @pytest.mark.parametrize("num_shards", [1, 3])
    def test_a_saved_data_set(self, datasets: Any, tmp_path: Path, num_shards: int) -> None:
        made = datasets.Dataset.from_list(ROWS).shuffle(seed=0).select(range(90))
        made.save_to_disk(tmp_path, num_shards=num_shards)
        reader = HuggingFace(tmp_path)
        assert len(reader.shards()) == num_shards
        assert _all(reader) == list(made)

    def test_a_saved_dict(self, datasets: Any, tmp_path: Path) -> None:
        made = datasets.Dataset.from_list(ROWS).train_test_split(0.2, seed=0)
        made.save_to_disk(tmp_path)
        assert _all(HuggingFace(tmp_path, "test")) == list(made["test"])

    def test_labels_images_and_arrays_come_as_arrow_has_them(
        self, datasets: Any, tmp_path: Path
    ) -> None:
        features = datasets.Features(
            {
                "label": datasets.ClassLabel(names=["ant", "bee"]),
                "image": datasets.Image(decode=False),
                "grid": datasets.Array2D((2, 3), "int32"),
            }
        )
        rows = [
            {"label": i % 2, "image": {"bytes": b"png", "path": None}, "grid": [[i] * 3] * 2}
            for i in range(5)
        ]
        datasets.Dataset.from_list(rows, features).save_to_disk(tmp_path)
        assert _all(HuggingFace(tmp_path)) == rows


class TestMds:
    @pytest.fixture
    def writer(self) -> Any:
        try:
            from streaming import MDSWriter
        except ImportError as error:
            pytest.skip(f"streaming is not installed: {error}")
        return MDSWriter

    COLUMNS = {  # noqa: RUF012
        "any": "ndarray",
        "byte": "uint8",
        "bytes": "bytes",
        "decimal": "str_decimal",
        "fixed": "ndarray:int16:2,3",
        "float": "float64",
        "half": "float16",
        "int": "int",
        "json": "json",
        "long": "str_int",
        "real": "str_float",
        "text": "str",
        "typed": "ndarray:float32",
    }

    @pytest.mark.parametrize("compression", [None, "zstd:7", "gz"])
    def test_what_streaming_writes(
        self, writer: Any, tmp_path: Path, compression: str | None
    ) -> None:
        from decimal import Decimal

        rng = np.random.default_rng(0)
        rows = [
            {
                "any": rng.integers(0, 9, (i % 3 + 1, 300)).astype(np.uint16),
                "byte": i,
                "bytes": rng.bytes(i % 9 + 1),
                "decimal": Decimal("1.25") * (i + 1),
                "fixed": np.full((2, 3), i, np.int16),
                "float": i / 3,
                "half": np.float16(i),
                "int": -i,
                "json": {"a": [i, None]},
                "long": 10**20 + i,
                "real": i / 7,
                "text": f"grün {i}",
                "typed": np.arange(i + 1, dtype=np.float32),
            }
            for i in range(50)
        ]
        folder = tmp_path / "out"
        options = {"compression": compression, "size_limit": 1 << 14, "hashes": ["sha1"]}
        with writer(out=str(folder), columns=self.COLUMNS, **options) as out:
            for row in rows:
                out.write(row)
        reader = Mds(folder)
        assert len(reader.shards()) > 1
        assert _all(reader) == [plain(row) for row in rows]
        found = next(reader.read(0))
        assert isinstance(found, dict)
        assert found["any"].dtype == np.uint16
        assert found["fixed"].dtype == np.int16
        assert found["typed"].flags.writeable


class TestTar:
    @pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
    def test_what_webdataset_writes_and_reads(self, tmp_path: Path, suffix: str) -> None:
        webdataset = pytest.importorskip("webdataset")
        path = tmp_path / f"0.{suffix}"
        with webdataset.TarWriter(str(path)) as out:
            for i, row in enumerate(ROWS):
                sample = {"__key__": f"a.b/{i:03d}", "TXT": row["text"], "cls": i % 3}
                if i % 4:
                    sample["seg.json"] = row
                out.write(sample)
        ours = _all(Tar(path))
        theirs = [
            {k: v for k, v in sample.items() if k not in ("__url__", "__local_path__")}
            for sample in webdataset.WebDataset(str(path), shardshuffle=False)
        ]
        assert ours == theirs
        assert len(ours) == len(ROWS)

    def test_what_gnu_tar_writes(self, tmp_path: Path) -> None:
        webdataset = pytest.importorskip("webdataset")
        for i in range(20):
            folder = tmp_path / "in" / ("deep" * 30 if i % 3 else "d.ot")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}.txt").write_text(f"{i}")
            (folder / f"{i}.x.JSON").write_text("{}")
            (folder / "no extension").touch()
        for kind in ("gnu", "posix"):
            path = tmp_path / f"{kind}.tar"
            command = ["tar", "--sort=name", f"--format={kind}", "-cf", str(path), "."]
            subprocess.run(command, cwd=tmp_path / "in", check=True)
            theirs = webdataset.WebDataset(str(path), shardshuffle=False)
            expected = [{k: v for k, v in s.items() if k != "__url__"} for s in theirs]
            for sample in expected:
                sample.pop("__local_path__", None)
            assert _all(Tar(path)) == expected
            assert len(expected) == 20
