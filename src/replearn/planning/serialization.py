"""Frozen dataclasses to and from JSON data, with strict checks: files may come from untrusted sources."""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..errors import ReplearnError
from ..operators._base.options import Options, options_from_dict

_hints = cache(get_type_hints)
LARGEST = 2**63 - 1
LONGEST = 8 * 2**20  # characters of a JSON text; parsed, a list of empty lists takes 30 times the text's memory


def read_text(path: Path, largest: int = LONGEST) -> str:
    """The text of a file of bounded size; ReplearnError for a pipe or a device, which may never end."""
    about = path.stat()
    if not S_ISREG(about.st_mode):
        raise ReplearnError("it is not an ordinary file.")
    if about.st_size > largest:
        raise ReplearnError(f"{about.st_size / 2**20:.0f} MiB is too large.")
    return path.read_text(encoding="utf-8")


def parse(text: Any, where: str, longest: int = LONGEST) -> Any:
    """The data of a JSON text; ReplearnError if it is not JSON, too long or nested too deeply."""
    if isinstance(text, (str, bytes)) and len(text) > longest:
        raise ReplearnError(f"{where} is {len(text):,} characters of JSON; at most {longest:,} are read.")
    try:
        return json.loads(text)
    except RecursionError:
        raise ReplearnError(f"{where} is not JSON: it is nested too deeply.") from None
    except (TypeError, ValueError) as error:
        raise ReplearnError(f"{where} is not JSON ({str(error)[:200]}).") from error


def encode(value: Any) -> Any:
    """Dataclasses as dicts and tuples as lists, which `decode` reverses."""
    if isinstance(value, Options):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def decode(kind: Any, data: Any, where: str) -> Any:
    """Data of exactly this type, or a ReplearnError that says where it is not."""
    if isinstance(kind, type) and issubclass(kind, Options):
        return _options(data, where)
    if is_dataclass(kind):
        return _dataclass(kind, data, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return _expect(isinstance(data, str) and data in inner, data, where, f"one of {', '.join(inner)}")
    if origin in (Union, types.UnionType):  # X | None
        return None if data is None else decode(inner[0], data, where)
    if origin is tuple:
        return _tuple(inner, data, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        _expect(isinstance(data, dict), data, where, "an object")
        return {decode(str, key, where): decode(inner[1], item, f"{where}.{key}") for key, item in data.items()}
    if kind is str:
        # JSON can hold unpaired surrogates, and UTF-8 can't
        right = isinstance(data, str) and not any("\ud800" <= character <= "\udfff" for character in data)
        return _expect(right, data, where, "a text")
    if kind is bool:
        return _expect(isinstance(data, bool), data, where, "true or false")
    if kind is int:
        whole = isinstance(data, int) and not isinstance(data, bool) and 0 <= data <= LARGEST
        return _expect(whole, data, where, "a whole number from 0 on")
    if kind is float:
        number = isinstance(data, (int, float)) and not isinstance(data, bool) and math.isfinite(data)
        return float(_expect(number, data, where, "a finite number"))
    raise TypeError(f"{where}: a field of type {kind} can't be read from JSON")


def _dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), data, where, "an object")
    hints = _hints(kind)
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(data.keys() - known.keys()):
        raise ReplearnError(f"{where} has no field {unknown[0]!r}; its fields are {', '.join(known)}")
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ReplearnError(f"{where} lacks the field {name!r}")
    return kind(**{name: decode(hints[name], item, f"{where}.{name}") for name, item in data.items()})


def _options(data: Any, where: str) -> Options:
    _expect(isinstance(data, dict), data, where, "an object")
    try:
        return options_from_dict(data)
    except ReplearnError as error:
        raise ReplearnError(f"{where}: {error}") from error


def _tuple(inner: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(data, list), data, where, "a list")
    if inner[-1] is Ellipsis:
        inner = (inner[0],) * len(data)
    _expect(len(inner) == len(data), data, where, f"a list of {len(inner)}")
    return tuple(
        decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(inner, data, strict=True))
    )


def _expect(holds: bool, data: Any, where: str, what: str) -> Any:
    if holds:
        return data
    shown = "a list" if isinstance(data, list) else "an object" if isinstance(data, dict) else ascii(data)
    raise ReplearnError(f"{where} is {what}, not {shown if len(shown) < 60 else shown[:60] + '...'}")
