"""A configuration as commented TOML: each value under the text that documents it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from infinity.config.schema import Config
from infinity.config.section import Section
from infinity.sizes import GiB, KiB, MiB

WIDTH = 110


def write_commented(config: Config) -> str:
    """TOML that `load_config` reads back into an equal Config. Unset keys stand as comments."""
    return "\n".join(_lines(config)) + "\n"


def _lines(config: Config) -> Iterator[str]:
    yield "# Configuration of infinity. Any key can also be set as --set section.key=value."
    fields = type(config).model_fields
    for name, field in fields.items():
        if not isinstance(getattr(config, name), Section):
            yield from _key_lines(name, field, getattr(config, name))
    for name in fields:
        section = getattr(config, name)
        if isinstance(section, Section):
            yield from ("", *_comment(type(section).__doc__ or ""), f"[{name}]")
            for key, field in type(section).model_fields.items():
                yield from _key_lines(key, field, getattr(section, key))


def _key_lines(name: str, field: FieldInfo, value: Any) -> Iterator[str]:
    yield from ("", *_comment(field.description or ""))
    shown = name.endswith("_size") or name in ("hbm", "activations", "cpu")  # sizes read as text
    text = toml_size(value) if shown and isinstance(value, int) else toml_value(value)
    yield f"# {name} = (unset)" if value is None else f"{name} = {text}"


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), WIDTH)]


def toml_value(value: Any) -> str:
    """A TOML literal. JSON's strings, numbers and booleans are TOML's too; None cannot be written and is left out of tables."""
    if isinstance(value, Section):
        value = {name: entry for name, entry in value if entry is not None}
        return toml_value(value["path"] if set(value) == {"path"} else value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml_value(entry)}" for name, entry in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def toml_size(nbytes: int) -> str:
    for factor, unit in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if nbytes and nbytes % factor == 0:
            return f'"{nbytes // factor}{unit}"'
    return str(nbytes)
