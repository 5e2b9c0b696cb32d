"""What a policy that loads may still have wrong: names that are nobody's here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

import dispatch

OPS = ("matmul", "dgrad", "wgrad")
_ARCH = re.compile(r"sm\d+|cpu(-.*)?|.*[*?\[].*")


def doubts(policy: dispatch.Policy) -> list[str]:
    """Return what to look at again in a policy, each as `key: what is odd`; [] where nothing is.

    No errors: a plugin may be installed elsewhere, an op or an arch may come with a later version.
    """
    known = [info.name for info in dispatch.backends()]
    values = policy.to_dict()
    stated = [
        (f"{section}.{key}", names) for section in ("fallback", "backends") for key, names in values[section].items()
    ]
    found = []
    for i, rule in enumerate(values["rules"]):
        place = f"rules[{i}]"
        for op in rule["match"].get("op", ()):
            if not any(fnmatchcase(name, op) for name in OPS):
                found.append(f"{place}.match.op: {op!r} matches none of {', '.join(OPS)}")
        for arch in rule["match"].get("arch", ()):
            if not _ARCH.fullmatch(arch):
                found.append(f"{place}.match.arch: {arch!r} matches no arch; they are named like sm90 and cpu-avx512")
        overrides: dict[str, Iterable[str]] = rule["overrides"]
        stated += [
            (f"{place}.{key}", names) for key, names in overrides.items() if key.startswith(("fallback.", "backends."))
        ]
    for key, names in stated:
        for name in names:
            if not any(fnmatchcase(own, name) for own in known):
                found.append(f"{key}: {name!r} matches no backend that is registered here: {', '.join(known)}")
    watched = [f"guard.{key}" for key, off in (("mode", "off"), ("probe_every", 0)) if values["guard"][key] != off]
    if watched and values["error"]["metric"] == "max_abs_over_scale":
        found.append(
            f"{watched[0]}: no probe estimates error.metric max_abs_over_scale: the framework's own product serves"
        )
    return found
