"""What a policy file may say: its sections, keys and values, checked one by one."""

from __future__ import annotations

import difflib
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dispatch.policies.facts import Range

from dispatch._measurement import METRICS
from dispatch._problem import FLOAT_DTYPES
from dispatch._recipe import RecipePair
from dispatch.frameworks import NAMES

_LARGEST: Final = sys.float_info.max
Check = Callable[[Any], Any]
"""Returns a value as the policy holds it, or raises ValueError with what is allowed."""


class PolicyError(ValueError):
    """A policy that cannot be used: which file, which key, what it says and what is allowed."""


@dataclass(frozen=True, slots=True)
class Statements:
    """What one source says. values: by dotted key. rules: for each, what it matches and its values, the same way."""

    values: dict[str, Any]
    rules: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = ()
    extends: str | None = None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise ValueError("allowed: a finite number, 0 or more")
    return float(value)


def _whole(least: int) -> Check:
    def check(value: Any) -> int:
        whole = value.is_integer() if isinstance(value, float) else type(value) is int
        if not whole or value < least:
            raise ValueError(f"allowed: a whole number, {least} or more")
        return int(value)

    return check


def _one_of(*allowed: str) -> Check:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{_guess(value, allowed)}allowed: {', '.join(allowed)}")
        return value

    return check


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("allowed: a string that is not empty")
    return value


def _recipe(value: Any) -> RecipePair:
    return RecipePair.parse(value)


def _list(check: Check, least: int = 0, alone: bool = False) -> Check:
    """Return a check for a list of at least `least` items; `alone`: one item may stand without a list."""

    def check_list(value: Any) -> tuple[Any, ...]:
        items = [value] if alone and not isinstance(value, list | tuple) else value
        if not isinstance(items, list | tuple) or len(items) < least:
            raise ValueError(f"allowed: a list{f' of at least {least}' if least else ''}")
        return tuple(dict.fromkeys(check(item) for item in items))

    return check_list


def _range(value: Any) -> Range:
    if not isinstance(value, Mapping):
        size = _SIZE(value)
        return Range(size, size)
    if not value or not set(value) <= {"min", "max"}:
        raise ValueError("allowed: a whole number, or a table with min, max or both, such as { min = 1, max = 16 }")
    found = Range(_SIZE(value.get("min", 0)), _SIZE(value["max"]) if "max" in value else None)
    if found.most is not None and found.most < found.least:
        raise ValueError("allowed: a min that is not above the max")
    return found


_SIZE: Final = _whole(0)
_GLOBS: Final = _list(_name, least=1, alone=True)
KEYS: Final[dict[str, dict[str, Check]]] = {
    "gate": {"min_speedup": _number, "min_speedup_lossless": _number},
    "error": {"metric": _one_of(*METRICS), "tolerance": _number, "traced": _one_of("random", "calibrated")},
    "recipes": {
        "allow": _list(_recipe),
        "inputs": _list(_one_of(*FLOAT_DTYPES)),
        "accumulation": _list(_one_of("fast", "promoted"), least=1),
    },
    "tuning": {
        "mode": _one_of("measure", "off", "locked"),
        "budget_ms": _number,
        "compile_ms": _number,
        "memory_mb": _whole(1),
    },
    "guard": {
        "mode": _one_of("off", "async", "strict"),
        "probe_every": _whole(0),
        "cool_down_s": _number,
        "traced": _one_of("off", "callback"),
    },
    "fallback": {"too_slow": _list(_name), "too_wrong": _list(_name)},
    "backends": {"allow": _list(_name), "deny": _list(_name)},
}
MATCH: Final[dict[str, Check]] = {
    "op": _GLOBS,
    "scope": _GLOBS,
    "m": _range,
    "n": _range,
    "k": _range,
    "dtype": _list(_one_of(*FLOAT_DTYPES), least=1, alone=True),
    "arch": _GLOBS,
    "framework": _list(_one_of(*NAMES), least=1, alone=True),
}


def parse(text: str, source: str) -> Statements:
    """Return what the TOML `text` says. Raises PolicyError, naming `source`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{source}: not valid TOML: {error}") from None
    except RecursionError:
        raise PolicyError(
            f"{source}: nested too deeply; allowed: tables in sections, rules and what they match"
        ) from None
    return check(data, source)


def check(data: Mapping[str, Any], source: str) -> Statements:
    """Return the checked statements in `data`, laid out as a policy file is. Raises PolicyError, naming `source`."""
    rest = dict(data)
    extends = rest.pop("extends", None)
    if extends is not None and (not isinstance(extends, str) or not extends):
        raise PolicyError(f"{source}: extends = {extends!r}: allowed: the name of a shipped policy")
    rules = rest.pop("rules", [])
    if not isinstance(rules, list | tuple):
        raise PolicyError(f"{source}: rules = {rules!r}: allowed: tables, each headed [[rules]]")
    values = _sections(rest, source, "", ("extends", "rules"))
    return Statements(values, tuple(_rule(rule, source, f"rules[{i}].") for i, rule in enumerate(rules)), extends)


def _rule(data: Any, source: str, prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    rest = dict(_table(data, source, prefix[:-1]))
    if not rest.get("match"):
        raise PolicyError(f"{source}: {prefix}match is missing or empty; state one or more of {', '.join(MATCH)}")
    match = _keys(rest.pop("match"), MATCH, source, f"{prefix}match")
    values = _sections(rest, source, prefix, ("match",))
    if not values:
        raise PolicyError(f"{source}: {prefix[:-1]} overrides nothing; state a key of {', '.join(KEYS)}")
    return match, values


def _sections(data: Mapping[str, Any], source: str, prefix: str, others: tuple[str, ...]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section, keys in data.items():
        if section not in KEYS:
            raise PolicyError(_unknown(source, f"{prefix}{section}", section, (*KEYS, *others)))
        found = _keys(keys, KEYS[section], source, f"{prefix}{section}")
        values |= {f"{section}.{key}": value for key, value in found.items()}
    return values


def _keys(data: Any, checks: Mapping[str, Check], source: str, where: str) -> dict[str, Any]:
    values = {}
    for key, value in _table(data, source, where).items():
        if key not in checks:
            raise PolicyError(_unknown(source, f"{where}.{key}", key, checks))
        try:
            values[key] = checks[key](value)
        except ValueError as error:
            raise PolicyError(f"{source}: {where}.{key} = {value!r}: {error}") from None
    return values


def _table(data: Any, source: str, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise PolicyError(f"{source}: {where} = {data!r}: allowed: a table of keys and values")
    return data


def _unknown(source: str, where: str, name: str, allowed: Iterable[str]) -> str:
    elsewhere = " or ".join(f"{section}.{name}" for section, keys in KEYS.items() if name in keys)
    guess = _guess(name, allowed) or (f"did you mean {elsewhere}? " if elsewhere else "")
    return f"{source}: {where} is unknown; {guess}allowed: {', '.join(allowed)}"


def _guess(value: Any, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(value), list(allowed), n=1)
    return f"did you mean {near[0]}? " if near else ""
