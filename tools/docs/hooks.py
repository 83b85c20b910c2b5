"""What MkDocs calls while it builds the site (`hooks` in mkdocs.yml)."""

from __future__ import annotations

from typing import Any

import reference


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fills in the generated parts of the reference."""
    return reference.fill(markdown)
