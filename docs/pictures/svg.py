"""A few shapes as SVG, with colours for light and for dark pages."""

from __future__ import annotations

from xml.sax.saxutils import escape

WIDTH = 560
MARGIN = 14
# The card keeps the text readable where a page does not tell a picture which theme it has.
COLOURS = {
    "light": {
        "card": "#f7f8fa",
        "rule": "#d5d9e0",
        "text": "#1f2430",
        "faint": "#667080",
        "theirs": "#3565c4",
        "other": "#7a8496",
        "yours": "#1f8a5b",
        "host": "#5b6474",
        "bad": "#c2352b",
        "box": "#ffffff",
    },
    "dark": {
        "card": "#1a1d23",
        "rule": "#3a404b",
        "text": "#e6e9ef",
        "faint": "#9aa4b3",
        "theirs": "#3f72d8",
        "other": "#6d778a",
        "yours": "#23925f",
        "host": "#596273",
        "bad": "#e0564b",
        "box": "#262a32",
    },
}


PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{shown_width:g}" \
height="{shown_height:g}" role="img">
<title>{title}</title>
<desc>{told}</desc>
<style>
text{{font:13px system-ui,-apple-system,'Segoe UI','Helvetica Neue',Arial,sans-serif}}
.mono{{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}
.title{{font-weight:600}}
.on{{fill:#fff;font-size:12px}}
.axis,.edge,.stripe{{fill:none;stroke-width:1.4}}
.wait{{fill:url(#wait)}}
{light}
@media (prefers-color-scheme:dark){{
{dark}
}}
</style>
<defs>
<pattern id="wait" width="7" height="7" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><path d="M0 0V7" class="stripe"/></pattern>
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" \
orient="auto"><path d="M0 0L8 4L0 8z" class="text"/></marker>
</defs>
<rect x="1" y="1" width="{card_width}" height="{card_height:g}" rx="8" class="card"/>
{shapes}
</svg>
"""


def _rules(theme: str) -> str:
    """Return the style rules of one theme."""
    colour = COLOURS[theme]
    fills = [f".{name}{{fill:{value}}}" for name, value in colour.items() if name != "rule"]
    strokes = {
        ".card,.box,.axis": colour["rule"],
        ".edge": colour["text"],
        ".wait,.stripe": colour["bad"],
    }
    lines = [f"{which}{{stroke:{value}}}" for which, value in strokes.items()]
    return "\n".join(["".join(fills), "".join(lines), f".patch{{fill:{colour['card']}}}"])


def text(x: float, y: float, words: str, kind: str = "text", anchor: str = "start") -> str:
    """Return words whose middle line is at `y`."""
    place = f'x="{x:g}" y="{y + 4.5:g}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle with round corners."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="4" class="{kind}"/>'


def document(shapes: list[str], height: float, title: str, told: str) -> str:
    """Return a whole picture; `told` is what it says to those who cannot see it."""
    return PICTURE.format(
        width=WIDTH,
        height=height,
        shown_width=WIDTH * 1.25,
        shown_height=height * 1.25,
        card_width=WIDTH - 2,
        card_height=height - 2,
        title=escape(title),
        told=escape(told),
        light=_rules("light"),
        dark=_rules("dark"),
        shapes="\n".join(shapes),
    )
