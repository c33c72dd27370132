"""Draw the chart of the first page from the results of `make bench`: `python docs/chart.py bench.json`."""

import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
ROW = "samples"  # of bench.json
NAMES = {"cachedfs": "cachedfs", "tensorstore": "tensorstore", "gcsfs": "gcsfs"}  # from top to bottom
PASSES = {"cold": "first pass", "second": "second pass"}
TITLE = "Seconds for 300 random samples of a Zarr array"
COLORS = {  # text, quiet text, then the two passes: of cachedfs, of the others
    "light": ("#1f2328", "#59636e", "#8c9eff", "#3f51b5", "#c8ced6", "#a3acb8"),
    "dark": ("#f0f6fc", "#a3acb8", "#5c6bc0", "#9fa8ff", "#4a525c", "#6b7480"),
}
WIDTH, LEFT, RIGHT, TOP = 460, 170, 48, 40
BAR, GAP, GROUP = 17, 3, 16


def seconds_of(results: list[dict]) -> dict[str, list[float]]:
    """Return the seconds of the passes of each tool in the chart, from the results in bench.json."""
    found = {each["contender"]: each["figures"] for each in results if each["row"] == ROW}
    return {name: [found[name][each]["median"] for each in PASSES] for name in NAMES}


def shown(seconds: float) -> str:
    """Return a time as the tables of the benchmarks show it."""
    return f"{seconds:.{1 if seconds >= 10 else 2 if seconds >= 0.1 else 3}f}"


def drawn(seconds: dict[str, list[float]], scheme: str) -> str:
    """Return the chart as an SVG for a page of this color scheme."""
    text, quiet, *colors = COLORS[scheme]
    scale = (WIDTH - LEFT - RIGHT) / max(map(max, seconds.values()))
    parts, y = [f'<text y="20" font-size="16" font-weight="600" fill="{text}">{TITLE}</text>'], TOP
    for name, times in seconds.items():
        is_ours = name == "cachedfs"
        weight = 700 if is_ours else 400
        parts.append(f'<text y="{y + 14}" fill="{text}" font-weight="{weight}">{escape(NAMES[name])}</text>')
        for label, took, color in zip(
            PASSES.values(), times, colors[:2] if is_ours else colors[2:], strict=True
        ):
            end = LEFT + max(2.0, took * scale)
            parts += [
                f'<text x="{LEFT - 8}" y="{y + 13.5}" font-size="12.5" text-anchor="end" fill="{quiet}">{label}</text>',
                f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="{BAR}" rx="2" fill="{color}"/>',
                f'<text x="{end + 7:.1f}" y="{y + 14}" fill="{text}" font-weight="{weight}">{shown(took)}</text>',
            ]
            y += BAR + GAP
        y += GROUP
    words = "; ".join(f"{NAMES[name]} {' and '.join(map(shown, times))}" for name, times in seconds.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - GROUP}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="15">\n'
        f"<title>{TITLE}, first and second pass: {words}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def main(path: str) -> None:
    """Write the chart for light and dark pages beside this file."""
    seconds = seconds_of(json.loads(Path(path).read_text(encoding="utf-8"))["results"])
    for scheme in COLORS:
        (HERE / f"chart-{scheme}.svg").write_text(drawn(seconds, scheme), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
