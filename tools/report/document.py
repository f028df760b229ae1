"""A self-contained HTML document with inline style and script, and a policy that blocks everything else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from .html import text


def document(title: str, name: str, lede: str, facts: str, notes: Sequence[str], parts: Mapping[str, str]) -> str:
    """Return the whole page. The run's `name` replaces `{}` in the title; facts may be empty.

    name, lede, facts and notes are untrusted text; title is trusted; parts map headings to HTML.
    """
    css, script = (Path(__file__).with_name(file).read_text("utf-8") for file in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    anchors = {heading: text(heading.lower().replace(" ", "-")) for heading in parts}
    links = "".join(f'<li><a href="#{anchor}">{text(heading)}</a></li>' for heading, anchor in anchors.items())
    body = "".join(
        f'<section aria-labelledby="{anchors[heading]}"><h2 id="{anchors[heading]}">{text(heading)}</h2>\n'
        f"{content}</section>\n"
        for heading, content in parts.items()
    )
    said = "".join(f"<li>{text(note, most=1000)}</li>" for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title.format(text(name))}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{title.format(f"<bdi>{text(name)}</bdi>")}</h1>
<p class="lede">{text(lede, most=1000)}</p>
{f'<p class="facts"><bdi>{text(facts, most=1000)}</bdi></p>' if facts else ""}
{f'<ul class="notes">{said}</ul>' if notes else ""}
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{body}</main>
<script>{script}</script>
</body>
</html>
"""
