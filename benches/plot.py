"""Plots tokens per second against batch size, with the machine's limits, as an SVG. Standard library only.

    /tmp/peer/bin/python benches/peers/llama_cpp/run.py --work /tmp/peer-models --formats i2_s,tl2 --json > speed.txt
    python3 benches/plot.py speed.txt --bandwidth 30e9 --products 6e12 --bytes 0.81e9 -o docs/images/speed.svg

`--bandwidth` and `--products` are figures of `tritmill doctor`; `--bytes` is the size of the weights that a step
reads, a figure of `tritmill bench engine`. A model with 2 billion weights multiplies 2.41e9 weights per token.
"""

import argparse
import json
import math

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 790, 430, 64, 180, 52, 52
COLOURS = {"i2_s": "#0b6e4f", "tl1": "#7a5195", "tl2": "#1f77b4", "llama.cpp": "#b04a2f"}
NAMES = {"llama.cpp": "llama.cpp TQ2_0", "i2_s": "Tritmill i2_s", "tl1": "Tritmill tl1", "tl2": "Tritmill tl2"}
PRODUCTS_OF_TOKEN = 2.41e9


def nice(top):
    """A step of 1, 2 or 5 times a power of ten that gives four to eight lines."""
    step = 10 ** math.floor(math.log10(top / 4))
    return next(s for s in (step, 2 * step, 5 * step, 10 * step) if top / s <= 8)


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("figures", help="output of the peer's run; its last line is JSON")
    a.add_argument("--bandwidth", type=float, required=True, help="bytes a second from memory")
    a.add_argument("--products", type=float, required=True, help="int8 products a second")
    a.add_argument("--bytes", type=float, required=True, help="bytes that a step reads")
    a.add_argument("--title", default="Decode, 2B shape")
    a.add_argument("-o", "--output", required=True)
    args = a.parse_args()
    with open(args.figures) as file:
        rows = json.loads(file.read().strip().splitlines()[-1])
    lines = {}
    for row in rows:
        if row["phase"] == "decode":
            lines.setdefault(row["program"], []).append((row["batch"], row["tokens_per_s"]))
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    top = max(rate for points in lines.values() for _, rate in points) * 1.12
    x = lambda n: LEFT + (WIDTH - LEFT - RIGHT) * math.log2(n / batches[0]) / math.log2(batches[-1] / batches[0])
    y = lambda rate: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * rate / top
    limit = lambda n: min(n * args.bandwidth / args.bytes, args.products / PRODUCTS_OF_TOKEN)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        'font-size="13" role="img">',
        f"<title>{args.title}: tokens a second against batch</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="600" fill="#1c1c1c">{args.title}: tokens/s against sequences in a batch</text>',
    ]
    step = nice(top)
    for i in range(int(top / step) + 1):
        at = y(i * step)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e3e3e3"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#555">{i * step:g}</text>')
    for n in batches:
        out.append(f'<text x="{x(n):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" fill="#555">{n}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle" fill="#555">sequences</text>')
    steps = [batches[0] * (batches[-1] / batches[0]) ** (i / 200) for i in range(201)]
    roof = " ".join(f"{x(n):.1f},{y(limit(n)):.1f}" for n in steps if limit(n) <= top)
    out.append(f'<polyline points="{roof}" fill="none" stroke="#777" stroke-dasharray="5 4"/>')
    last = max((n for n in steps if limit(n) <= top), default=None)
    if last:
        out.append(f'<text x="{x(last) + 6:.1f}" y="{max(y(limit(last)), TOP) + 4:.1f}" fill="#777">memory’s limit</text>')
    for program, points in sorted(lines.items(), key=lambda line: -line[1][-1][1]):
        points.sort()
        path = " ".join(f"{x(n):.1f},{y(rate):.1f}" for n, rate in points)
        colour = COLOURS[program]
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        out += [f'<circle cx="{x(n):.1f}" cy="{y(rate):.1f}" r="3.5" fill="{colour}"/>' for n, rate in points]
    # Names beside the last points, without overlaps.
    below = math.inf
    for program, points in sorted(lines.items(), key=lambda line: line[1][-1][1]):
        n, rate = points[-1]
        at = min(y(rate) + 4, below - 17)
        below = at
        out.append(f'<text x="{x(n) + 10:.1f}" y="{at:.1f}" fill="{COLOURS[program]}" font-weight="600">{NAMES[program]} {rate:.0f}</text>')
    out.append("</svg>")
    with open(args.output, "w") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
