"""What runs in the training process; the only part that needs torch, but for the demo.

loader.py        `connect`, and the loader that yields batches
arguments.py     what `connect` may be given
client.py        its client of Dask
steps.py         batches step by step
tee.py           several cursors over the same batches
confirmed.py     what a loop that asks early has really used
groups.py        one rank fetches, and broadcasts to its process group
ranks.py         which rank this process has, and of how many
tensors.py       from arrays to tensors
presets.py       batches under the names that a framework expects
encoders.py      items of other modalities: to the ranks that encode them, and embeddings back
"""
