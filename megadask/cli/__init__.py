"""The command line, the only part of the package that prints.

command.py       the command ``megadask`` and its options
simulate.py      ``megadask simulate``: what balancing would gain
index.py         ``megadask index``: what planning needs to know of every record
look.py          ``megadask look``: what is in files
verify_resume.py ``megadask verify-resume``: whether a pipeline resumes exactly
sources.py       how sources are named on the command line
"""

from megadask.cli.command import main

__all__ = ["main"]
