"""An OpenAPI schema as one HTML page without scripts or external resources."""

from __future__ import annotations

import html
from typing import Any

import msgspec

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; color: #222; background: #fff }
summary { cursor: pointer; padding: .25rem 0 }
code, pre { font-family: ui-monospace, monospace; font-size: 13px }
pre { background: #f4f4f4; padding: .6rem; overflow-x: auto }
table { border-collapse: collapse; margin: .4rem 0 }
td, th { border: 1px solid #ddd; padding: .2rem .5rem; text-align: left;
  vertical-align: top }
.method { display: inline-block; width: 3.5rem; font-weight: 600 }
.refused { color: #999 }
details > :not(summary) { margin-left: 1rem }
"""


def schema_page(schema: dict[str, Any]) -> str:
    """Return a self-contained HTML page of `schema`."""
    info = schema["info"]
    title = html.escape(f"{info['title']} {info['version']}")
    operations = [
        _operation(path, method, operation)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    types = [
        _type(name, shown) for name, shown in schema["components"]["schemas"].items()
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1>"
        '<p>The same as <a href="openapi.json">openapi.json</a>.</p>'
        f"<h2>Paths</h2>{''.join(operations)}<h2>Types</h2>{''.join(types)}</html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    is_refused = operation.get("deprecated", False)
    head = (
        f'<span class="method">{method.upper()}</span> <code>{html.escape(path)}</code>'
        f" {html.escape(operation['summary'])}"
    )
    parts = [_row("query or path", p["name"]) for p in operation.get("parameters", ())]
    body = operation.get("requestBody", {}).get("content", {})
    for content in body.values():
        parts.append(_row("body", _kind(content["schema"]), is_html=True))
        for name, example in content.get("examples", {}).items():
            parts.append(
                _row(f"example: {name}", _pretty(example["value"]), is_html=True)
            )
    for status, response in operation["responses"].items():
        kinds = [
            f"{html.escape(media)}: {_kind(content['schema'])}"
            for media, content in response.get("content", {}).items()
        ]
        text = "<br>".join(kinds) or _kind(response)
        parts.append(_row(status, text, is_html=True))
    css = ' class="refused"' if is_refused else ""
    return (
        f"<details{css}><summary>{head}</summary><table>{''.join(parts)}</table>"
        "</details>"
    )


def _type(name: str, shown: dict[str, Any]) -> str:
    required = shown.get("required", ())
    rows = []
    for field, kind in shown.get("properties", {}).items():
        default = _pretty(kind["default"]) if "default" in kind else ""
        about = html.escape(kind.get("description", ""))
        must = "required" if field in required else default
        rows.append(
            f"<tr><td><code>{html.escape(field)}</code></td><td>{_kind(kind)}</td>"
            f"<td>{must}</td><td>{about}</td></tr>"
        )
    about = html.escape(shown.get("description", ""))
    return (
        f'<details id="{name}"><summary><code>{name}</code></summary><p>{about}</p>'
        f"<table>{''.join(rows)}</table></details>"
    )


def _kind(schema: dict[str, Any]) -> str:
    """Describe a type in a few words, with links to named types."""
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rsplit("/", 1)[-1])
        is_type = "/schemas/" in schema["$ref"]
        return f'<a href="#{name}">{name}</a>' if is_type else "error"
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return "one of " + ", ".join(_pretty(value) for value in schema["enum"])
    if "contentSchema" in schema:
        return f"events of {_kind(schema['contentSchema'])}"
    kind = schema.get("type", "any" if "description" not in schema else "")
    if "prefixItems" in schema:
        return f"[{', '.join(map(_kind, schema['prefixItems']))}]"
    if kind == "array" and "items" in schema:
        return f"list of {_kind(schema['items'])}"
    return html.escape(str(kind))


def _pretty(value: Any) -> str:
    return f"<code>{html.escape(msgspec.json.encode(value).decode())}</code>"


def _row(name: str, text: str, *, is_html: bool = False) -> str:
    shown = text if is_html else html.escape(text)
    return f"<tr><th>{html.escape(name)}</th><td>{shown}</td></tr>"
