"""How fast does training go, compared with other loaders, on the same data in the same run?

Ranks wait as long as a real model takes for what they were given, and then meet; everything else
is real: files, transforms, Dask, the planner, and the other loaders. Every system goes through the
same documents once: ``python benchmarks/bench_throughput.py``, for an hour and more. Ctrl-C ends it
with a report of the cells that are done. ``--measure`` measures anew how long the model takes,
``--real`` trains a small one for real on two ranks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from reporting import Report, arguments


def main() -> None:
    """Run what the options ask for."""
    parser = arguments(__doc__)
    parser.add_argument("--measure", action="store_true", help="measure the step times, and end")
    parser.add_argument("--real", action="store_true", help="train for real, on two ranks")
    parser.add_argument("--passes", type=int, help="passes of each system")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="cells with one of these in their name, in this order",
    )
    parser.add_argument("--alone", action="store_true", help="MegaDask without the others")
    options = parser.parse_args()
    # Not above: the processes of Dask import this file, and have no use for torch.
    if options.measure:
        from throughput.measure import measure

        measure()
        return
    with tempfile.TemporaryDirectory(prefix="bench-throughput-") as folder:
        if options.real:
            from throughput import real

            report = Report("throughput-real", "Throughput of two ranks that train", options)
            real.run(report, Path(folder), options.passes, quick=options.quick)
            report.write()
        else:
            from throughput import comparison

            report = Report("throughput", "Throughput", options)
            comparison.run(report, Path(folder), options)


if __name__ == "__main__":
    main()
