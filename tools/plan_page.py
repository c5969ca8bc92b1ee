"""The plan as one HTML page that needs nothing else: pictures are in it, and no script."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

__all__ = ["render_page"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #1a1a1a; }
h1 { font-size: 1.4em; margin-bottom: 0.2em; } h2 { font-size: 1.1em; margin-top: 1.6em; }
.verdict { border-left: 4px solid #2166ac; padding: 0.4em 0.8em; background: #f4f7fb; }
table { border-collapse: collapse; } td, th { padding: 0.15em 0.9em 0.15em 0; text-align: left; }
td + td { text-align: right; font-variant-numeric: tabular-nums; } img { max-width: 100%; height: auto; }
pre { overflow-x: auto; font-size: 12px; line-height: 1.35; background: #f7f7f7; padding: 0.8em; }
"""


def render_page(
    *,
    title: str,
    verdict: str,
    figures: list[tuple[str, str]],
    table: str,
    png: bytes | None,
    sections: Sequence[tuple[str, list[str]]] = (),
) -> str:
    """The page. ``figures``: rows of name and value; ``table``: the plan as text; ``png``: its picture, if any;
    ``sections``: heading and lines of further tables.

    All text is escaped: names of modules are the user's.
    """
    rows = "\n".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in figures)
    picture = ""
    if png is not None:
        data = base64.b64encode(png).decode("ascii")
        picture = (
            '<h2>Pages, memory and engines over one step</h2>\n<img id="map" alt="page map, waveform, engines, '
            f'reuse distances, miss ratios and working sets of one step" src="data:image/png;base64,{data}">'
        )
    further = "\n".join(
        f"<h2>{escape(heading[:1].upper() + heading[1:])}</h2>\n<pre>{escape(chr(10).join(lines))}</pre>"
        for heading, lines in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="verdict">{escape(verdict)}</p>
<h2>Figures</h2>
<table>
{rows}
</table>
{picture}
{further}
<h2>Segments</h2>
<pre>{escape(table)}</pre>
</body>
</html>
"""
