"""The schema covers every route and describes what clients may send."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import defaultdict
from typing import Any

import msgspec
import pytest
from app_world import App
from starlette.routing import Route

from sglang.srt.entrypoints.endpoint import Endpoint
from sglang.srt.entrypoints.neutral_fields import CHAT, COMPLETION, GENERATE
from sglang.srt.entrypoints.openapi import openapi_schema
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="cpu")

METHODS = {"get", "put", "post", "delete", "patch"}
JSON_TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}


@pytest.fixture(scope="module")
def app() -> App:
    return App()


@pytest.fixture(scope="module")
def schema(app: App) -> dict[str, Any]:
    response = app.ask("GET", "/openapi.json")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for child in value.values() for ref in references(child)]
    if isinstance(value, list):
        return [ref for child in value for ref in references(child)]
    return []


def test_every_route_is_there(app: App, schema: dict[str, Any]) -> None:
    routes = [route for route in app.app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.app.routes) > 30
    methods: dict[str, set[str]] = defaultdict(set)
    for route in routes:
        path = re.sub(r":path", "", route.path)
        methods[path] |= {m.lower() for m in (route.methods or set()) - {"HEAD"}}
    assert {path: set(own) for path, own in schema["paths"].items()} == methods


def test_it_is_openapi(schema: dict[str, Any]) -> None:
    assert schema["openapi"] == "3.1.0"
    assert set(schema) == {"openapi", "info", "paths", "components"}
    assert {"title", "version"} <= set(schema["info"])
    ids = []
    for path, methods in schema["paths"].items():
        assert path.startswith("/") and set(methods) <= METHODS
        for method, operation in methods.items():
            ids.append(operation["operationId"])
            assert operation["summary"] and operation["responses"]
            assert all(re.fullmatch("[1-5][0-9]{2}", s) for s in operation["responses"])
            named = {
                p["name"]
                for p in operation.get("parameters", ())
                if p["in"] == "path" and p["required"]
            }
            assert named == set(re.findall(r"\{(\w+)\}", path))
            assert "requestBody" not in operation or method in {"post", "put"}
    assert len(set(ids)) == len(ids)
    for reference in references(schema):
        node = schema
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
    for response in schema["components"]["responses"].values():
        assert response["description"]


def test_types_are_json_schema(schema: dict[str, Any]) -> None:
    def check(node: dict[str, Any]) -> None:
        kind = node.get("type")
        assert kind is None or kind in JSON_TYPES
        for name in ("anyOf", "prefixItems"):
            for child in node.get(name, ()):
                check(child)
        for name in ("items", "additionalProperties"):
            if isinstance(node.get(name), dict):
                check(node[name])
        for child in node.get("properties", {}).values():
            check(child)
        assert set(node.get("required", ())) <= set(node.get("properties", {}))

    for component in schema["components"]["schemas"].values():
        assert component["type"] == "object"
        check(component)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("GenerateRequest", GENERATE),
        ("CompletionRequest", COMPLETION),
        ("ChatRequest", CHAT),
    ],
)
def test_fields_that_are_not_served_have_their_neutral_values(
    schema: dict[str, Any], name: str, table: dict[str, Any]
) -> None:
    shown = schema["components"]["schemas"][name]["properties"]
    for field, neutral in table.items():
        if neutral.is_any:
            assert "enum" not in shown[field]
        else:
            # `==` would take 0 for false.
            expected = json.dumps(list(neutral.values))
            assert json.dumps(shown[field]["enum"]) == expected


def test_fields_that_are_known_by_no_name_are_refused(schema: dict[str, Any]) -> None:
    for name in ("GenerateRequest", "ChatRequest", "TokenizeRequest", "SamplingParams"):
        shown = schema["components"]["schemas"][name]
        assert shown["additionalProperties"] is False


def test_sampling_parameters_are_a_type_of_their_own(schema: dict[str, Any]) -> None:
    shown = schema["components"]["schemas"]["SamplingParams"]["properties"]
    assert set(shown) == set(SamplingParams.__struct_fields__)
    assert "in (0, 1]" in shown["top_p"]["description"]
    kinds = [kind.get("type") for kind in shown["stop"]["anyOf"]]
    assert sorted(kinds) == ["array", "null", "string"]
    used = schema["components"]["schemas"]["GenerateRequest"]["properties"]
    assert "#/components/schemas/SamplingParams" in references(used["sampling_params"])


def test_examples_are_bodies_that_the_handlers_read(app: App) -> None:
    count = 0
    for route in app.app.routes:
        assert isinstance(route, Endpoint)
        for body in route.operation.examples.values():
            msgspec.convert(body, route.operation.body, strict=True)
            count += 1
    assert count >= 10


def test_a_route_that_does_not_describe_itself_is_refused() -> None:
    async def nothing(request: Any) -> Any: ...

    with pytest.raises(TypeError, match="does not describe itself"):
        openapi_schema([Route("/new", nothing)])


def test_a_server_with_a_key_says_so() -> None:
    app = App(api_key="k")
    assert app.ask("GET", "/openapi.json").status_code == 401
    headers = {"authorization": "Bearer k"}
    schema = app.ask("GET", "/openapi.json", headers=headers).json()
    asked = schema["paths"]["/generate"]["post"]
    assert asked["security"] == [{"bearer": []}] and "401" in asked["responses"]
    assert "security" not in schema["paths"]["/health"]["get"]
    assert schema["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"


def test_the_page_names_every_path_and_needs_nothing_from_elsewhere(
    app: App, schema: dict[str, Any]
) -> None:
    response = app.ask("GET", "/docs")
    assert response.headers["content-type"].startswith("text/html")
    for path in schema["paths"]:
        assert f"<code>{path}</code>" in response.text
    for name in schema["components"]["schemas"]:
        assert f'id="{name}"' in response.text
    assert not re.search(r"<script|src=|//|@import|url\(", response.text)
    (style,) = re.findall(r"<style>(.*?)</style>", response.text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = response.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert f"style-src 'self' 'sha256-{digest}'" in policy
    assert response.headers["x-content-type-options"] == "nosniff"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
