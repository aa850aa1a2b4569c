"""The census for people: a text for the terminal, and one self-contained page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

_TEXT_BAR = 26
_SUMS = ("packages", "modules", "lines", "functions", "classes")

# Geometry of the page's charts, in the SVG's own units.
_WIDTH, _NAME, _VALUE, _ROW, _BAR = 560, 168, 76, 30, 16


def text(title: str, figures: dict[str, Any]) -> str:
    """The figures as plain text, at most 80 columns wide."""
    parts = [
        title,
        "=" * len(title),
        "   ".join(f"{figures[name]:,} {name}" for name in _SUMS),
        "",
        _text_bars("Largest packages, by lines", figures["largest"], "package", "lines"),
        "",
        _text_bars("Most imported, by how many modules", figures["imported"], "module", "by"),
        "",
        _text_rows(
            "Deepest nesting, in levels",
            [(each["depth"], f"{each['module']}, line {each['line']}") for each in figures["deepest"][:5]],
        ),
        "",
        _text_rows(
            "Longest functions, in lines", [(e["lines"], _function(e)) for e in figures["longest"][:5]]
        ),
        "",
        f"Modules that cannot be parsed: {len(figures['unparsable'])}",
        *(f"  {module}" for module in figures["unparsable"]),
    ]
    return "\n".join(parts) + "\n"


def _text_bars(heading: str, rows: Sequence[dict[str, Any]], name: str, value: str) -> str:
    largest = max((row[value] for row in rows), default=1)
    width = max((len(row[name]) for row in rows), default=0)
    lines = [heading]
    for row in rows:
        bar = "█" * max(1, round(row[value] / largest * _TEXT_BAR))
        lines.append(f"  {row[name]:<{width}}  {row[value]:>9,}  {bar}")
    return "\n".join(lines)


def _text_rows(heading: str, rows: Sequence[tuple[int, str]]) -> str:
    return "\n".join([heading, *(f"  {number:>5,}  {what}" for number, what in rows)])


def _function(each: dict[str, Any]) -> str:
    return f"{each['function']} in {each['module']}, line {each['line']}"


def html(title: str, figures: dict[str, Any]) -> str:
    """The figures as one page that needs nothing else, in light and dark."""
    tiles = "".join(f'<div class="tile"><b>{figures[name]:,}</b><span>{name}</span></div>' for name in _SUMS)
    unparsable = figures["unparsable"]
    return _PAGE.format(
        title=escape(title),
        style=_STYLE,
        tiles=tiles,
        largest=_chart(figures["largest"], "package", "lines", _package_hint),
        imported=_chart(figures["imported"], "module", "by", lambda row: f"{row['by']:,} modules import it"),
        deepest=_table(
            ("levels", "module", "line"),
            [(each["depth"], each["module"], each["line"]) for each in figures["deepest"]],
        ),
        longest=_table(
            ("lines", "function", "module"),
            [(each["lines"], each["function"], each["module"]) for each in figures["longest"]],
        ),
        count=len(unparsable),
        unparsable=", ".join(f"<code>{escape(each)}</code>" for each in unparsable) or "none",
    )


def _package_hint(row: dict[str, Any]) -> str:
    return f"{row['modules']:,} modules, {row['functions']:,} functions, {row['classes']:,} classes"


def _chart(
    rows: Sequence[dict[str, Any]], name: str, value: str, hint: Callable[[dict[str, Any]], str]
) -> str:
    """Horizontal bars on a common scale, each with its name and number, and a hint for the mouse."""
    largest = max((row[value] for row in rows), default=1)
    room = _WIDTH - _NAME - _VALUE
    grid = "".join(
        f'<line x1="{x}" y1="0" x2="{x}" y2="{_ROW * len(rows)}"/>'
        for x in (_NAME + round(room * part / 4, 1) for part in range(5))
    )
    bars = []
    for index, row in enumerate(rows):
        length = max(2.0, round(room * row[value] / largest, 1))
        top, middle = index * _ROW + (_ROW - _BAR) / 2, index * _ROW + _ROW / 2
        label = f"{row[name]}: {row[value]:,}"
        bars.append(
            f"<g><title>{escape(label)} ({escape(hint(row))})</title>"
            f'<text class="name" x="{_NAME - 10}" y="{middle}">{escape(_shortened(row[name]))}</text>'
            f'<rect x="{_NAME}" y="{top}" width="{length}" height="{_BAR}" rx="3"/>'
            f'<text class="value" x="{_NAME + length + 8}" y="{middle}">{row[value]:,}</text></g>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_ROW * len(rows)}" role="img">'
        f'<g class="grid">{grid}</g>{"".join(bars)}</svg>'
    )


def _shortened(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:10]}…{name[-11:]}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    def cell(value: object) -> str:
        number = isinstance(value, int)
        return f'<td class="number">{value:,}</td>' if number else f"<td>{escape(str(value))}</td>"

    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b2230; --soft: #667085;
  --line: #e4e7ec; --bar: #3b6fd4; --bar2: #0f8a7e; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1319; --card: #181e27; --ink: #e8ecf2;
  --soft: #98a2b3; --line: #2a3340; --bar: #6c9bf5; --bar2: #3fc1b0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.45;
  font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 15px; }
main { max-width: 1220px; margin: 0 auto; padding: 40px 24px 48px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -0.01em; }
p.lead { margin: 0 0 28px; color: var(--soft); }
h2 { font-size: 15px; margin: 0 0 14px; font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 16px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 16px; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.tile { padding: 16px 20px; }
.tile b { display: block; font-size: 26px; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.cards { margin-top: 16px; }
section { padding: 20px 22px; min-width: 0; }
section.wide { margin-top: 16px; }
svg { width: 100%; height: auto; display: block; }
svg rect { fill: var(--bar); }
svg g:hover rect { opacity: .78; }
.second rect { fill: var(--bar2); }
svg text { fill: var(--ink); font-size: 13px; dominant-baseline: central; }
svg .name { text-anchor: end; }
svg .value { fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid line { stroke: var(--line); stroke-width: 1; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 12px; padding: 0 12px 6px 0; }
td { padding: 6px 12px 6px 0; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
td.number { font-variant-numeric: tabular-nums; width: 64px; }
code { font-size: 13px; overflow-wrap: anywhere; }
footer { margin-top: 28px; color: var(--soft); font-size: 13px; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="lead">Every module read and parsed, one task run for each package, joined by FlowForge.</p>
<div class="tiles">{tiles}</div>
<div class="cards">
<section><h2>Largest packages, by lines</h2>{largest}</section>
<section class="second"><h2>Most imported, by how many modules import them</h2>{imported}</section>
<section><h2>Deepest nesting, in levels of statements</h2>{deepest}</section>
<section><h2>Longest functions, in lines</h2>{longest}</section>
</div>
<section class="wide"><h2>{count} modules that cannot be parsed</h2>{unparsable}</section>
<footer>Packages are directories of modules; a package counts the modules that lie directly in it.</footer>
</main>
</body>
</html>
"""
