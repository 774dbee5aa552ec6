"""Whether a JSON value has the form of docs/doctor.schema.json: as much of JSON Schema as that file uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA: Any = json.loads((Path(__file__).resolve().parents[2] / "docs/doctor.schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
WORDS = {"type", "const", "enum", "required", "properties", "additionalProperties", "items", "$ref", "$defs"}


def faults(value: Any, schema: Any = SCHEMA, place: str = "$") -> list[str]:
    """What is wrong, and where; empty if nothing is."""
    if "$ref" in schema:
        return faults(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], place)
    assert set(schema) <= WORDS | {"$schema", "title"}, f"not understood at {place}: {schema}"
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and type(value) not in [TYPES[name] for name in types]:
        return [f"{place} is {value!r}, and no {types}"]
    found = []
    if value not in schema.get("enum", [schema.get("const", value)]):
        found.append(f"{place} is {value!r}")
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties", {})
        found += [f"{place} has no {name}" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            if name in known or more is not False:
                found += faults(item, known.get(name, more), f"{place}.{name}")
            else:
                found.append(f"{place} has {name}")
    if isinstance(value, list):
        for position, item in enumerate(value):
            found += faults(item, schema.get("items", {}), f"{place}[{position}]")
    return found
