"""What every configuration section shares: frozen values, no unknown keys, fields documented by the text under them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo
from pydantic.fields import FieldInfo

from infinity.sizes import parse_bytes


class Section(BaseModel):
    """A named group of settings. The text under a field is its documentation and reaches `infinity init`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True)


def _bytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f'{value!r} is not a size: write bytes as a whole number, or "512KiB", "1.5GiB" (binary), "2GB" (decimal)')
    nbytes = parse_bytes(value)
    if nbytes < 0:
        raise ValueError(f"{value!r} is negative: sizes start at 0")
    return nbytes


def _bytes_or_auto(value: object) -> int | str:
    return "auto" if value == "auto" else _bytes(value)


def _absolute(value: object, info: ValidationInfo) -> Any:
    """A relative path starts at the configuration file's folder, handed in as the validation context."""
    if not isinstance(value, str | Path):
        return value
    if not str(value):
        raise ValueError("is empty: name a directory")
    folder = (info.context or {}).get("folder", Path.cwd())
    return os.path.abspath(Path(folder) / Path(value).expanduser())


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


def section_type(field: FieldInfo) -> type[Section] | None:
    """The section a field holds, itself or in a list; None for a plain value."""
    pending: list[Any] = [field.annotation]
    while pending:
        candidate = pending.pop()
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
        pending += get_args(candidate)
    return None


Bytes = Annotated[int, BeforeValidator(_bytes)]
"""A size in bytes, written as a number or as text such as "1MiB"."""

AutoBytes = Annotated[int | Literal["auto"], BeforeValidator(_bytes_or_auto)]
"""A size in bytes, or "auto": the engine decides and prints what it took."""

Number = Annotated[float, BeforeValidator(_no_boolean)]
"""A finite float."""

Whole = Annotated[int, BeforeValidator(_no_boolean)]
"""An integer; `true` is not one."""

Directory = Annotated[str, BeforeValidator(_absolute)]
"""An absolute path."""
