"""Draws docs/plan.svg, the plan of a ResNet-32. `python docs/plan_picture.py` writes it."""

from __future__ import annotations

from pathlib import Path

import replearn

PICTURE = Path(__file__).parent / "plan.svg"
WIDTH, STEP, BOX = 780, 48, 34
STYLE = """<style>
  text { font: 13px sans-serif; fill: #333 }
  .box { fill: #dbe5ee; stroke: #6b8299 }
  .gone { fill: #f6c667 }
  .source { fill: #9fc5e8; stroke: #36607f }
  path { fill: none; stroke: #36607f; marker-end: url(#tip) }
  @media (prefers-color-scheme: dark) { text { fill: #ddd } .box + text { fill: #222 } }
</style>
<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">
  <path d="M0,0 L6,3 L0,6" style="fill: #36607f; stroke: none; marker-end: none"/>
</marker></defs>"""


def draw() -> str:
    model = replearn.models.resnet32()
    plan = replearn.plan(model, interval=4, first=4)  # the paper's rule
    targets = {target.name: target for target in plan.targets}
    sources = {name for target in plan.targets for name in (target.previous, target.next)}
    parts, x = [], 10
    for stack in replearn.find_stacks(model):
        parts.append(f'<text x="{x}" y="24">{stack.name}</text>')
        for index, name in enumerate(stack.blocks):
            kind = "box gone" if name in targets else "box source" if name in sources else "box"
            parts.append(
                f'<rect class="{kind}" x="{x}" y="60" width="{BOX}" height="{BOX}" rx="4"/>'
            )
            parts.append(f'<text x="{x + 13}" y="82">{index}</text>')
            if name in targets:
                middle = x + BOX // 2
                for side in (-STEP, STEP):
                    start, top, end = middle + side, middle + side // 2, middle + side // 6
                    parts.append(f'<path d="M{start},58 Q{top},34 {end},56"/>')
            x += STEP
        x += 14
    legend = "orange: replaced by an operator; blue: the neighbours whose weights it reads"
    parts.append(f'<text x="10" y="122">{legend}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 134" role="img">\n'
        "<title>Which blocks of a ResNet-32 a plan with interval 4 replaces</title>\n"
        f"{STYLE}\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
