"""The parsed footer of a Parquet file, once for all that have the file open in this process."""

from __future__ import annotations

import os
import threading
from collections import deque
from weakref import WeakValueDictionary

import pyarrow as pa
import pyarrow.parquet as pq

#: Footers that somebody holds. Parsed they take some nine times their bytes.
_FOOTERS: WeakValueDictionary[tuple[str | int, ...], pq.FileMetaData] = WeakValueDictionary()
#: Those of local files held last, unless they are larger than this: lanes of a source are opened
#: in a row. A remote file may have been written anew in the same size.
_LAST: deque[pq.FileMetaData] = deque(maxlen=4)
_LAST_BYTES = 2**20
_LOCK = threading.Lock()


def shared_footer(url: str, source: pa.NativeFile) -> pq.FileMetaData:
    """Return the footer of an open file, read unless somebody holds that of the same bytes.

    A file that was written anew has another size or, on local disks, another time of change.
    """
    key: tuple[str | int, ...] = (url, source.size())
    if "://" not in url:
        now = os.stat(url)
        key = (*key, now.st_dev, now.st_ino, now.st_mtime_ns)
    with _LOCK:
        footer = _FOOTERS.get(key)
    if footer is None:
        read = pq.read_metadata(source)
        with _LOCK:  # another thread may have been quicker
            footer = _FOOTERS.setdefault(key, read)
            if "://" not in url and footer.serialized_size <= _LAST_BYTES:
                _LAST.append(footer)
    return footer
