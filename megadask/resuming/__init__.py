"""Whether a pipeline resumes exactly, tried out before a run relies on it.

verify.py        runs a pipeline undisturbed and interrupted, on clusters of its own
report.py        what came of it
"""
