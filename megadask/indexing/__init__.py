"""Metadata without payload: lengths that are known before a record is read.

index.py         `megadask.index`: reads sources once and writes down what planning needs
sidecar.py       the files of an index
length_column.py lengths that the files hold in a column
known.py         which of the two a source has, and whether its transform allows it
file_lengths.py  nothing but the lengths of some files, for ``megadask simulate``
"""
