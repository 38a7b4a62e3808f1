"""Inline SVG: line charts and one bar of shares. Text in, text out; no styles from elsewhere."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Point = tuple[float, float]
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d", "#475569", "#a16207")
WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 28
MAX_POINTS = 600


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]
    dots: bool = False


def chart(title: str, lines: Sequence[Line], *, floor: float | None = None, ceiling: float | None = None) -> str:
    """A chart of one or more lines over steps; says so when there is nothing to draw."""
    drawn = [line for line in lines if line.points]
    heading = f"<figcaption>{html.escape(title)}</figcaption>"
    if not drawn:
        return f"<figure>{heading}<p class='none'>nothing recorded</p></figure>"
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    left, right = min(xs), max(xs)
    low = min([*ys, *([] if floor is None else [floor])])
    high = max([*ys, *([] if ceiling is None else [ceiling])])
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5

    def place(point: Point) -> Point:
        across = (point[0] - left) / ((right - left) or 1)
        up = (point[1] - low) / (high - low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(low, high, left, right, place)]
    for line, colour in zip(drawn, COLOURS, strict=False):
        placed = [place(point) for point in thin(line.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.8'/>")
        if line.dots or len(placed) == 1:
            parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in placed]
    legend = "".join(
        f"<span><i style='background:{colour}'></i>{html.escape(line.name)} <b>{line.points[-1][1]:.4g}</b></span>"
        for line, colour in zip(drawn, COLOURS, strict=False)
    )
    svg = f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{html.escape(title, quote=True)}'>"
    return f"<figure>{heading}{svg}{''.join(parts)}</svg><div class='legend'>{legend}</div></figure>"


def _grid(low: float, high: float, left: float, right: float, place: Callable[[Point], Point]) -> str:
    parts = []
    for value in ticks(low, high):
        _, y = place((left, value))
        parts.append(f"<line x1='{LEFT}' x2='{WIDTH - RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#e5e7eb'/>")
        parts.append(f"<text x='{LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{value:,.6g}</text>")
    for value, anchor in ((left, "start"), (right, "end")):
        x, _ = place((value, low))
        parts.append(f"<text x='{x:.1f}' y='{HEIGHT - 8}' text-anchor='{anchor}'>{value:.6g}</text>")
    return "".join(parts)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values between low and high."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS points: means over runs of neighbours."""
    if len(points) <= MAX_POINTS:
        return list(points)
    thinned = []
    for i in range(MAX_POINTS):
        part = points[i * len(points) // MAX_POINTS : (i + 1) * len(points) // MAX_POINTS]
        thinned.append((part[-1][0], sum(y for _, y in part) / len(part)))
    return thinned


def shares(title: str, parts: Mapping[str, float], unit: str = "s") -> str:
    """One bar, divided; the largest part first."""
    whole = sum(parts.values())
    heading = f"<figcaption>{html.escape(title)}</figcaption>"
    if whole <= 0:
        return f"<figure>{heading}<p class='none'>nothing recorded</p></figure>"
    bars, legend, x = [], [], 0.0
    for (name, value), colour in zip(sorted(parts.items(), key=lambda item: -item[1]), COLOURS * 3, strict=False):
        width = value / whole * WIDTH
        bars.append(f"<rect x='{x:.2f}' y='0' width='{width:.2f}' height='28' fill='{colour}'/>")
        share = f"{value:.4g} {unit}, {value / whole:.0%}"
        legend.append(f"<span><i style='background:{colour}'></i>{html.escape(name)} <b>{share}</b></span>")
        x += width
    svg = (
        f"<svg viewBox='0 0 {WIDTH} 28' role='img' aria-label='{html.escape(title, quote=True)}'>{''.join(bars)}</svg>"
    )
    return f"<figure class='wide'>{heading}{svg}<div class='legend'>{''.join(legend)}</div></figure>"
