"""The policy: what may be chosen, what it must gain and what it may lose; and which one is in force."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from dispatch.policies._file import PolicyError, Statements, check, parse
from dispatch.policies.facts import SECTIONS, Backends, ErrorGate, Fallback, Gate, Guard, Match, Recipes, Rule, Tuning

from dispatch._problem import Problem
from dispatch.frameworks import framework

_F = TypeVar("_F", bound=Callable[..., Any])
_CHANGED: Final = " (overridden)"
_in_force: ContextVar[Policy | None] = ContextVar("dispatch_policy", default=None)
_policy_contexts: list[Callable[[Policy], AbstractContextManager[Any]]] = []
"""What `use_policy` enters beside its own: a framework that traces registers its trace context here."""


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """What decides between candidates. Equal to every policy of the same fingerprint.

    origins: for each dotted key, the file, rule or override that its value came from. fingerprint: 16 hex digits of
    all but name and origins.
    """

    name: str
    gate: Gate
    error: ErrorGate
    recipes: Recipes
    tuning: Tuning
    guard: Guard
    fallback: Fallback
    backends: Backends
    rules: tuple[Rule, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", _digest(self.to_dict()))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Policy) and self.fingerprint == other.fingerprint)

    def __hash__(self) -> int:
        return hash(self.fingerprint)  # a string keeps its hash

    @property
    def choice_fingerprint(self) -> str:
        """The fingerprint without [tuning] and [guard]: what `measure` has decided, `locked` finds under it."""
        values = self.to_dict()
        del values["tuning"], values["guard"]
        for rule in values["rules"]:
            rule["overrides"] = {k: v for k, v in rule["overrides"].items() if not k.startswith(("tuning.", "guard."))}
        return _digest(values)

    def to_dict(self) -> dict[str, Any]:
        """Return sections and rules as plain values for JSON, without name and origins."""
        values: dict[str, Any] = {section: asdict(getattr(self, section)) for section in SECTIONS}
        values["recipes"]["allow"] = [str(pair) for pair in self.recipes.allow]
        values["rules"] = [
            {
                "match": {k: v for k, v in asdict(rule.match).items() if v is not None},
                "overrides": {k: [str(x) for x in v] if k == "recipes.allow" else v for k, v in rule.overrides},
            }
            for rule in self.rules
        ]
        return values

    def override(self, **sections: Mapping[str, Any]) -> Policy:
        """Return a copy with the given keys, checked as a file's are: `override(error={"tolerance": 0.1})`.

        `rules=[...]` appends rules. Rules are for what they match, and go on top of what is given here.
        """
        return self._overridden(_checked_override(sections))

    def for_problem(self, problem: Problem, scope: str | None) -> Policy:
        """Return the policy for `problem`, without rules: each that matches overrides, a later one the earlier."""
        result = self
        for rule in self.rules:
            if rule.match.covers(problem, scope):
                result = result._with(dict(rule.overrides), rule.origin)
        return replace(result, rules=()) if self.rules else self

    def _with(self, values: Mapping[str, Any], origin: str) -> Self:
        changed: dict[str, Any] = {}
        for section in dict.fromkeys(key.partition(".")[0] for key in values):
            own = {k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{section}.")}
            changed[section] = replace(getattr(self, section), **own)
        return replace(self, **changed, origins={**self.origins, **dict.fromkeys(values, origin)})

    def _overridden(self, said: Statements) -> Policy:
        return self._stating(said, "override", f"{self.name.removesuffix(_CHANGED)}{_CHANGED}")

    def _stating(self, said: Statements, origin: str, name: str) -> Policy:
        rules = _rules(said, origin)
        return replace(self._with(said.values, origin), name=name, rules=(*self.rules, *rules))


def shipped_policies() -> tuple[str, ...]:
    """Return the names of the policies that this package ships."""
    files = resources.files("dispatch.policies").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_policy(name_or_path: str | os.PathLike[str]) -> Policy:
    """Return a shipped policy by its name, or one from a file: a path, or text with a `/` or ending in `.toml`.

    A file states what differs from the shipped policy that it extends, `default` unless it says otherwise. Raises
    PolicyError.
    """
    text = os.fspath(name_or_path)
    seps = tuple(sep for sep in (os.sep, os.altsep) if sep)
    if isinstance(name_or_path, str) and not text.endswith(".toml") and not any(sep in text for sep in seps):
        return _shipped(text)
    path = os.path.expanduser(text)
    try:
        content = Path(path).read_text(encoding="utf-8-sig")  # some editors put a mark of their own first
    except (OSError, ValueError) as error:  # ValueError: what is no UTF-8, a path with a NUL
        known = ", ".join(shipped_policies())
        raise PolicyError(f"{path}: cannot be read ({error}); shipped policies: {known}") from None
    return _assemble(parse(content, path), path, path)


@functools.cache
def _shipped(name: str) -> Policy:
    if name not in (names := shipped_policies()):
        known = ", ".join(names)
        raise PolicyError(f"no policy is named {name!r}; shipped: {known}. A path has a {os.sep} or ends in .toml")
    file = resources.files("dispatch.policies") / f"{name}.toml"
    said = parse(file.read_text(encoding="utf-8"), str(file))
    if name != "default":
        return _assemble(said, str(file), name)
    kinds = {
        section: kind(**{x.name: said.values[f"{section}.{x.name}"] for x in fields(kind)})
        for section, kind in SECTIONS.items()
    }
    return Policy(name, **kinds, rules=_rules(said, str(file)), origins=dict.fromkeys(said.values, str(file)))


def _assemble(said: Statements, source: str, name: str) -> Policy:
    base = said.extends or "default"
    if base not in shipped_policies():
        raise PolicyError(f"{source}: extends = {base!r}: allowed: {', '.join(shipped_policies())}")
    return _shipped(base)._stating(said, source, name)


def _rules(said: Statements, origin: str) -> tuple[Rule, ...]:
    return tuple(
        Rule(Match(**match), tuple(sorted(values.items())), f"{origin} rules[{i}]")
        for i, (match, values) in enumerate(said.rules)
    )


def _checked_override(sections: Mapping[str, Any]) -> Statements:
    if "extends" in sections:
        raise PolicyError("override: extends is for files; name the policy to start from instead")
    return check(sections, "override")


def current_policy() -> Policy:
    """Return the policy in force: the innermost `use_policy`, else the one that DISPATCH_POLICY names, else default."""
    policy = _in_force.get()
    return _of_process() if policy is None else policy


@functools.cache
def _of_process() -> Policy:
    name = os.environ.get("DISPATCH_POLICY") or "default"
    try:
        return load_policy(name)
    except PolicyError as error:
        raise PolicyError(f"DISPATCH_POLICY={name}: {error}") from None


class use_policy(ContextDecorator):  # noqa: N801 - used as a function is
    """A context, and a decorator of functions, in which a policy is in force; entering it returns the policy.

    policy: a Policy, a shipped name or a path; None stands for the one in force at entry. sections override it, as
    `Policy.override` does: `use_policy(error={"tolerance": 0.1})`. One object serves one thread at a time. Raises
    PolicyError at once if the policy or a section is wrong.
    """

    def __init__(self, policy: Policy | str | os.PathLike[str] | None = None, /, **sections: Any) -> None:
        self._policy = policy if policy is None or isinstance(policy, Policy) else load_policy(policy)
        self._sections = sections
        self._said = _checked_override(sections) if sections else None
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Policy:
        policy = self._policy or current_policy()
        if self._said is not None:
            policy = policy._overridden(self._said)
        with ExitStack() as stack:
            stack.callback(_in_force.reset, _in_force.set(policy))
            if sys.modules.get("jax") is not None:
                framework("jax")  # its room registers a context when it is imported
            for context in _policy_contexts:
                stack.enter_context(context(policy))
            self._entered.append(stack.pop_all())
        return policy

    def __exit__(self, *exc: Any) -> None:
        self._entered.pop().__exit__(*exc)

    def __call__(self, func: _F) -> _F:
        """Return `func` with the policy in force in each call. Raises TypeError if a call does not run the body."""
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(kind(func) for kind in kinds):
            raise TypeError(f"use_policy cannot decorate {func!r}, whose body runs later; use it as a context in there")
        return super().__call__(func)

    def _recreate_cm(self) -> Self:
        return type(self)(self._policy, **self._sections)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


__all__ = ["Policy", "PolicyError", "current_policy", "load_policy", "shipped_policies", "use_policy"]
