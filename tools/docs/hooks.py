"""What MkDocs calls while it builds the site (`hooks` in mkdocs.yml)."""

from __future__ import annotations

from typing import Any

import reference

#: How much the search prefers the pages of a folder: a guide says how, the internals mention everything.
BOOSTS = {"guides": 3.0, "reference": 1.0, "internals": 0.3}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in the generated parts of the reference, and ranks the page for the search."""
    page.meta.setdefault("search", {"boost": BOOSTS.get(page.file.src_uri.partition("/")[0], 2.0)})
    return reference.fill(markdown)
