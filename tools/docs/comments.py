"""An extension of griffe, which reads our sources for the API pages: `#:` behind an attribute is its docstring."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Comments(griffe.Extension):
    """Takes the comment `#: meaning` on the line of an attribute as its docstring."""

    def on_attribute_instance(self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and isinstance(node, ast.AST) and attr.lines:
            _, found, text = attr.lines[-1].partition("#:")
            if found:
                attr.docstring = griffe.Docstring(text.strip(), parent=attr)
