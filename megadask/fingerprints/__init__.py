"""Texts that tell declared values apart: equal in every process that declares the same.

fingerprint.py   the text of a value: a name, numbers to read, a hash
encoder.py       what a value goes by, written out
changes.py       what code changes while it runs, which is not declared
codes.py         the names in code
trees.py         what its source says that it changes
members.py       what functions, classes and objects hold
values.py        texts of plain values, names of others
"""
