"""The report's colours, once: the style sheet is written from this table and a test computes its contrasts.

Charts are drawn with sentinel colours, one per name, which `var` turns into CSS variables; one SVG then serves
both themes and print.
"""

from __future__ import annotations

SERIES = 8  # distinct series colours; further series repeat them with other markers and dashes

LIGHT: dict[str, str] = {
    "page": "#fcfbf8",
    "raised": "#f4f2ec",
    "ink": "#1d1e22",
    "muted": "#5a5e66",
    "rule": "#d8d4ca",
    "grid": "#e6e3db",
    "axis": "#7d818a",
    "accent": "#1d5c9e",
    "holds": "#146341",
    "corrected": "#7a5200",
    "fails": "#a3261f",
    "undecided": "#515a68",
    "untestable": "#67488a",
    "waiting": "#62666e",
    "series-0": "#1d5c9e",
    "series-1": "#b0440c",
    "series-2": "#17734a",
    "series-3": "#83399a",
    "series-4": "#826000",
    "series-5": "#0c7080",
    "series-6": "#ad2453",
    "series-7": "#56606f",
}

DARK: dict[str, str] = {
    "page": "#15171b",
    "raised": "#1e2127",
    "ink": "#e9e7e2",
    "muted": "#a6abb4",
    "rule": "#3a3f48",
    "grid": "#2a2e35",
    "axis": "#858c97",
    "accent": "#86b8f0",
    "holds": "#6fcf9c",
    "corrected": "#e0b453",
    "fails": "#f58f82",
    "undecided": "#b3bcc9",
    "untestable": "#c5a5e6",
    "waiting": "#a0a6b0",
    "series-0": "#86b8f0",
    "series-1": "#f39a69",
    "series-2": "#6fc998",
    "series-3": "#d3a3e2",
    "series-4": "#d9b650",
    "series-5": "#62c8d4",
    "series-6": "#f28cab",
    "series-7": "#adb8c7",
}

_SENTINEL = 0xC0DE00  # a range of colours that no palette uses


def sentinel(name: str) -> str:
    """Return the colour to draw with where the page shall put ``var(--name)``."""
    return f"#{_SENTINEL + list(LIGHT).index(name):06x}"


def themed(style: str) -> str:
    """Return an SVG style text with every sentinel colour replaced by its CSS variable."""
    for name in LIGHT:
        style = style.replace(sentinel(name), f"var(--{name})")
    return style


def css() -> str:
    """Return the custom properties of both themes; print is always light."""

    def block(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in colours.items())

    return (
        f":root{{color-scheme:light dark;{block(LIGHT)}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{block(DARK)}}}}}\n"
    )


def contrast(a: str, b: str) -> float:
    """Return the WCAG contrast ratio of two ``#rrggbb`` colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)
