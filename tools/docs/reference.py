"""Reference pages from the source: each function returns Markdown for a mark `<!-- generated: NAME -->` in a page.

What is imported here needs no torch, so that the site can be built without it.
"""

from __future__ import annotations

import inspect
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import typer
import typer.main

import syncline
from syncline import config, errors
from syncline.cli.main import COMMANDS, app, load_command
from syncline.core import rule
from syncline.core.wire import tables
from syncline.net import frame, handshake

ROOT = pathlib.Path(__file__).parents[2]


def cell(text: str) -> str:
    """Text for one cell of a table: on one line, with nothing that would end the cell or open a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def code(text: str) -> str:
    """Code for one cell of a table; nothing for nothing."""
    return f"`{text}`" if text else ""


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]] | list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def comments(source: str, mark: str = "#") -> dict[str, str]:
    """The comments behind the fields of a class, by the name of the field."""
    return dict(re.findall(rf"^    (\w+): [^\n]*?  {mark} *([^\n]+)$", source, re.MULTILINE))


# -- the command line ---------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Every command by its whole name (`checkpoint ls`), the command and a context for its help."""
    root = typer.Context(typer.main.get_command(app), info_name="syncline")
    for name in COMMANDS:
        command = load_command(name)
        context = typer.Context(command, info_name=name, parent=root)
        yield name, command, context
        for other, below in getattr(command, "commands", {}).items():
            yield f"{name} {other}", below, typer.Context(below, info_name=other, parent=context)


def command_line() -> str:
    parts = []
    for name, command, context in commands():
        text = inspect.cleandoc(command.help or COMMANDS[name].help)
        prose, _, example = text.partition("\n\nExample:")
        usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
        parts.append(f"## syncline {name}\n\n{prose}\n\n```text\n{usage}\n```")
        if example:
            parts.append(f"```sh\n{inspect.cleandoc(example)}\n```")
        rows = [parameter.get_help_record(context) for parameter in command.params]
        # An argument's type says nothing beside its name.
        shown = [(re.sub(r"^([A-Z\[][\w\[\].]*) <.*>$", r"\1", row[0]), row[1]) for row in rows if row]
        if shown:
            parts.append(table(("argument or option", "meaning"), [(code(say), cell(text)) for say, text in shown]))
    return "\n\n".join(parts)


# -- settings -----------------------------------------------------------------------------------------------


def flags() -> dict[str, str]:
    """The option of `syncline run` for each setting that has one."""
    found = {}
    for parameter in load_command("run").params:
        long = [option for option in parameter.opts if option.startswith("--")]
        if long:
            found[parameter.name] = ", ".join(parameter.opts)
    found["check_finite"] = found.pop("no_check_finite")
    found["least_workers"] = found["most_workers"] = "-w MIN:MAX"
    found["auto_workers"] = "-w auto:MIN:MAX"
    return found


def settings() -> str:
    meanings, options = comments(inspect.getsource(config.JobConfig), "#:"), flags()
    fields = msgspec.structs.fields(config.JobConfig)
    missing = [field.name for field in fields if field.name not in meanings]
    assert not missing, f"settings without a line of meaning: {missing}"

    def row(field: Any) -> tuple[str, ...]:
        default = "" if field.default in ("", ()) else code(json.dumps(field.default))
        where = "launch, file" if field.name in config.LAUNCH_ONLY else "launch, file, `init`"
        if field.name not in options:
            where = where.removeprefix("launch, ")
        name = f'<span id="{field.name}"></span>`{field.name}`'
        return name, default, cell(meanings[field.name]), code(options.get(field.name, "")), where

    return table(("setting", "default", "meaning", "option", "can be set at"), [row(field) for field in fields])


# -- errors -------------------------------------------------------------------------------------------------


def error_classes() -> list[type[BaseException]]:
    """All classes of `syncline.errors`, in the order of the file."""
    return [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, BaseException)]


def error_pages() -> str:
    parts = ["```text\n" + inspect.cleandoc(errors.__doc__ or "").split("\n\n")[1] + "\n```"]
    for kind in error_classes():
        doc = inspect.cleandoc(kind.__doc__ or "")
        assert "\nRemedy: " in doc, f"{kind.__name__}: its docstring has no line that begins with 'Remedy: '"
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        module = "syncline" if kind.__name__ in syncline.__all__ else "syncline.errors"
        what, remedy = doc.split("\nRemedy: ")
        intro = f"`{module}.{kind.__name__}`, a subclass of {bases}."
        parts.append(f"## {kind.__name__}\n\n{intro}\n\n{what.strip()}\n\n**Remedy:** {remedy}")
    return "\n\n".join(parts)


def rules() -> str:
    """The rules by name, with the options that each takes."""
    rows = [(code(name), ", ".join(map(code, keys)) or "none") for name, keys in rule.OPTIONS.items()]
    return table(("rule", "options"), rows)


# -- the protocol -------------------------------------------------------------------------------------------


def frame_header() -> str:
    return "|" + inspect.cleandoc(frame.__doc__ or "").partition("|")[2]


def handshake_messages() -> str:
    kinds = [handshake.Hello, handshake.Challenge, handshake.Proof, handshake.Welcome]
    return messages_table(kinds)


def fields_of(message: type[Any]) -> str:
    said = comments(inspect.getsource(message))
    names = [field.name for field in msgspec.structs.fields(message)]
    return "; ".join(f"`{name}`" + (f" ({cell(said[name])})" if name in said else "") for name in names)


def messages_table(kinds: list[type[Any]]) -> str:
    return table(
        ("message", "meaning", "fields"),
        [(code(kind.__name__), cell(inspect.getdoc(kind) or ""), fields_of(kind)) for kind in kinds],
    )


def senders(message: type[Any]) -> str:
    return ", ".join(role for role in tables.ROLES if message in tables.MAY_SAY[role]) or "answer"


def messages() -> str:
    parts, modules = [], {}
    for number, kind in enumerate(tables.MESSAGES):
        modules.setdefault(kind.__module__, []).append((number, kind))
    for module, kinds in modules.items():
        title = inspect.getdoc(__import__(module, fromlist=["_"])) or ""
        rows = [(str(n), code(k.__name__), senders(k), cell(inspect.getdoc(k) or ""), fields_of(k)) for n, k in kinds]
        heading = f"### {module.removeprefix('syncline.')}\n\n{title.partition(chr(10) * 2)[0]}\n\n"
        parts.append(heading + table(("number", "message", "sent by", "meaning", "fields"), rows))
    return "\n\n".join(parts)


# -- pages that live elsewhere ------------------------------------------------------------------------------


def root_page(name: str) -> str:
    """A page of the repository's root, without its title, with links that work from docs/internals/."""
    text = (ROOT / name).read_text().partition("\n")[2]
    text = re.sub(r"\]\(docs/internals/", "](", text)
    text = re.sub(r"\]\(docs/", "](../", text)
    for other, page in (("CHANGELOG.md", "changes.md"), ("CONTRIBUTING.md", "contributing.md")):
        text = text.replace(f"]({other}", f"]({page}")
    return text


GENERATED: dict[str, Callable[[], str]] = {
    "command-line": command_line,
    "settings": settings,
    "errors": error_pages,
    "rules": rules,
    "frame": frame_header,
    "handshake": handshake_messages,
    "messages": messages,
    "contributing": lambda: root_page("CONTRIBUTING.md"),
    "changes": lambda: root_page("CHANGELOG.md"),
}


def fill(markdown: str) -> str:
    """The page with what its marks stand for."""
    return re.sub(r"<!-- generated: ([\w-]+) -->", lambda mark: GENERATED[mark[1]](), markdown)
