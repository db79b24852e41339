"""From a TOML or JSON file, a dict and `--set` words to one checked Config. Every failure is a ConfigError that lists all problems at once."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from infinity.config.schema import Config
from infinity.config.section import section_type
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Source = str | Path | Mapping[str, Any] | Config


def load_config(source: Source, overrides: Sequence[str] = ()) -> Config:
    """Read, override and check a configuration.

    `source` is the path of a .toml or .json file, a mapping of the same shape, or a Config. `overrides` are
    `section.key=value` words; values are TOML, and a bare word is a string. Relative paths start at the file's folder
    (at the working directory for a mapping). The environment is not read. Raises ConfigError naming the file, each key,
    its value and the way out.
    """
    if isinstance(source, Config) and not overrides:
        return source
    if isinstance(source, Config):
        values, folder, origin = source.model_dump(), Path.cwd(), "configuration"
    elif isinstance(source, Mapping):
        values, folder, origin = _copied(source), Path.cwd(), "configuration"
    else:
        path = Path(source)
        values, folder, origin = _read(path), path.absolute().parent, str(path)
    for word in overrides:
        _override(values, word)
    try:
        return Config.model_validate(values, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError(_report(origin, error)) from None


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in values.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. `infinity init {path}` writes one to start from.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        values = _parse(path, text)
    except ValueError as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}, not an object of sections.")
    return values


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix == ".json":
        return json.loads(text)
    raise ConfigError(f"{path}: configurations are .toml or .json files, not {path.suffix or 'without suffix'!r}.")


def _override(values: dict[str, Any], word: str) -> None:
    """Put one `section.key=value` into `values`."""
    key, equals, text = word.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {word!r}: write section.key=value, such as nvme.queue_depth=64.")
    table = values
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {word!r}: {name!r} is a value, not a section.")
    table[names[-1]] = _toml_value(text.strip())


def _toml_value(text: str) -> Any:
    """`1e-3`, `true`, `["a", "b"]` as TOML; anything that is not TOML is the string itself."""
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if len(values) == 1 else text


def _report(origin: str, error: ValidationError) -> str:
    lines = [_line(problem) for problem in error.errors(include_url=False)]
    return f"{origin}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{origin}: {len(lines)} problems", *lines])


def _line(problem: ErrorDetails) -> str:
    """`nvme.queue_depth = 0: Input should be greater than or equal to 1`."""
    key, value = _key(problem["loc"]), problem["input"]
    if problem["type"] == "extra_forbidden":
        return f"{key}: {_no_such_key(key)}"
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "model_type":
        text = f"is a section: write [{key}] and its keys below it"
    if problem["type"] == "string_pattern_mismatch":
        text = _FORMS.get(key.rpartition(".")[2], text)
    return f"{key} = {_shown(value)}: {text}" if key else text


_FORMS = {
    "device": 'is not a device: write "auto", "cpu", "cuda" or "cuda:0"',
    "run": "is not a name of a run: use letters, digits, dot, dash and underscore, and begin with a letter or digit",
    "model": "does not name a function: write module:function, such as gpt:build",
    "data": "does not name a function: write module:function, such as gpt:data",
}
"""What a pattern means, in words."""


def _key(loc: tuple[int | str, ...]) -> str:
    """("nvme", "paths", 0, "weight") -> "nvme.paths[0].weight"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _no_such_key(key: str) -> str:
    """The nearest right name: a sibling first, then the same name in another section."""
    section, _, name = re.sub(r"\[\d+\]", "", key).rpartition(".")
    known = sorted(_known_keys())
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    elsewhere = [other for other in known if other.rpartition(".")[2] == name]
    near = difflib.get_close_matches(name, siblings, n=1)
    if near or elsewhere:
        return f"no such key; did you mean {(near or elsewhere)[0]}?"
    return f"no such key; {section or 'the top level'} has {', '.join(siblings)}"


def _known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if section := section_type(field):
            yield from _known_keys(section, f"{prefix}{name}.")
