"""Views of a fitted cost: a report in text, and a figure for a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megadask.planner.measured import Fit, Measured

#: Launches that a report lists: those that the law misses most.
_SHOWN = 8
#: Side of the figure, in pixels.
_SIDE = 260
_COLOURS = {"law": "#2a6fb0", "without squares": "#d0813a"}


def text_of(cost: Measured) -> str:
    """Return the law and, if it was fitted, how it met its launches."""
    rows = [
        ("per document", cost.per_document_s),
        ("per token", cost.per_token_s),
        ("per token^2", cost.per_token2_s),
    ]
    if cost.per_launch_s:
        rows.append(("per launch", cost.per_launch_s))
    lines = [repr(cost), *(f"  {name:13}{value:12.4g} s" for name, value in rows)]
    if cost.per_token_s and cost.per_token2_s:
        even = cost.per_token_s / cost.per_token2_s
        lines.append(f"  squares outweigh tokens above {even:.4g} tokens")
    fit = cost.fit
    if fit is None:
        return "\n".join([*lines, "  given, not fitted"])
    lines.append(
        f"  R^2 {fit.r2:.4f} over {len(fit.seconds)} launches; without squares {fit.linear_r2:.4f}"
    )
    worst = sorted(range(len(fit.seconds)), key=lambda n: (-abs(fit.residuals[n]), n))[:_SHOWN]
    lines.append(f"  {'launch':>6}{'documents':>11}{'tokens':>9}{'seconds':>11}{'off by':>11}")
    for n in worst:
        share = fit.residuals[n] / fit.seconds[n]
        lines.append(
            f"  {n:6}{fit.num_documents[n]:11}{fit.tokens[n]:9}{fit.seconds[n]:11.4g}"
            f"{fit.residuals[n]:+11.2g} ({share:+.1%})"
        )
    if len(fit.seconds) > _SHOWN:
        lines.append(f"  the {_SHOWN} that are off most, of {len(fit.seconds)}")
    return "\n".join(lines)


def html_of(cost: Measured) -> str:
    """Return the report with a figure of measured against fitted seconds."""
    figure = "" if cost.fit is None else _figure(cost.fit)
    return f"<div>{figure}<pre>{escape(text_of(cost))}</pre></div>"


def _figure(fit: Fit) -> str:
    most = max(*fit.seconds, *fit.fitted_s, *fit.linear_s)

    def at(value: float) -> float:
        return _SIDE * value / most

    dots = [
        f'<circle cx="{at(fitted):.1f}" cy="{_SIDE - at(taken):.1f}" r="4" fill="{_COLOURS[name]}">'
        f"<title>launch {n}, {fit.tokens[n]} tokens: {taken:.4g} s, fitted {fitted:.4g} s</title>"
        "</circle>"
        for name, values in (("without squares", fit.linear_s), ("law", fit.fitted_s))
        for n, (taken, fitted) in enumerate(zip(fit.seconds, values, strict=True))
    ]
    named = (("law", "c0 + a l + b l²", fit.r2), ("without squares", "c0 + a l", fit.linear_r2))
    legend = [
        f'<circle cx="{_SIDE + 20}" cy="{20 + 20 * place}" r="4" fill="{_COLOURS[name]}"/>'
        f'<text x="{_SIDE + 30}" y="{24 + 20 * place}">{law}, R² {r2:.4f}</text>'
        for place, (name, law, r2) in enumerate(named)
    ]
    return (
        f'<svg width="{_SIDE + 230}" height="{_SIDE + 60}" role="img" font-size="12" '
        'fill="currentColor" '
        'aria-label="measured against fitted seconds"><g transform="translate(10, 24)">'
        '<text y="-8">Seconds of every launch: measured (up) against fitted (right)</text>'
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#999"/>'
        f'<line x1="0" y1="{_SIDE}" x2="{_SIDE}" y2="0" stroke="#999"/>'
        f'<text y="{_SIDE + 16}">0</text>'
        f'<text x="{_SIDE}" y="{_SIDE + 16}" text-anchor="end">{most:.3g} s</text>'
        f"{''.join(dots)}{''.join(legend)}</g></svg>"
    )
