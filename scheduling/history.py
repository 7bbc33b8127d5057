"""What is kept of steps when their plans are freed: short facts, and digests of all so far."""

from __future__ import annotations

import hashlib
from typing import Any

from megadask.planner.plan import Plan


def chain(digest: str, link: str) -> str:
    """Return the digest of a sequence from that of all but its last member, and of that one."""
    return hashlib.blake2b(f"{digest}{link}".encode(), digest_size=16).hexdigest()


def summary(plan: Plan) -> dict[str, Any]:
    """Return what `stats` keeps of a plan."""
    return {
        "step": plan.step,
        "num_spans": plan.table.num_rows,
        "num_tokens": int(plan.table["tokens"].sum()),
        "num_microbatches": plan.num_microbatches,
        "imbalance": plan.imbalance,
        "bound": plan.bound,
        "efficiency": plan.efficiency,
        "draw_digest": plan.draw_digest,
        "assignment_digest": plan.assignment_digest,
        "mixture": dict(plan.mixture),
    }
