"""Policies: found, checked, layered, scoped."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import threading
import tomllib
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from dispatch.policies import policy as _policy
from dispatch.policies._file import KEYS, MATCH, check
from dispatch.policies.facts import SECTIONS, Backends, Match, Range
from dispatch.policies.policy import Policy, PolicyError, current_policy, load_policy, shipped_policies, use_policy
from hypothesis import given
from hypothesis import strategies as st

from dispatch._problem import Operand, Problem
from dispatch._recipe import RecipePair

FOLDER = resources.files("dispatch.policies")
SCHEMA = json.loads((FOLDER / "schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def problem(m=16, n=4096, k=1024, a="bfloat16", b="bfloat16", arch="sm90", framework="torch"):
    return Problem(m, n, k, Operand(a), Operand(b), "bfloat16", framework, arch)


@pytest.fixture
def write(tmp_path):
    def write_policy(text, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_policy


@pytest.fixture
def fresh_process_default():
    _policy._of_process.cache_clear()
    yield
    _policy._of_process.cache_clear()


# What is shipped


def test_ships_these():
    assert shipped_policies() == ("default", "inference", "native", "strict")


@pytest.mark.parametrize("name", shipped_policies())
def test_shipped_files_fit_the_schema_and_load(name):
    VALIDATOR.validate(tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8")))
    policy = load_policy(name)
    assert policy.name == name
    assert set(policy.origins) == {f"{section}.{key}" for section, keys in KEYS.items() for key in keys}


def test_default_has_the_figures_that_the_readme_states():
    policy = load_policy("default")
    assert dataclasses.astuple(policy.gate) == (1.5, 1.05)
    assert dataclasses.astuple(policy.error) == ("similarity_loss", 0.005, "random")
    assert [str(pair) for pair in policy.recipes.allow] == ["e4m3:row", "e4m3:tensor", "e4m3:1x128@e4m3:128x128"]
    assert "float32" not in policy.recipes.inputs
    assert policy.recipes.accumulation == ("fast",)
    assert dataclasses.astuple(policy.tuning) == ("measure", 2000, 60000, 4096)
    assert dataclasses.astuple(policy.fallback) == (("cublas",), ("bf16_fallback",))


def test_the_others_differ_as_they_say():
    strict, native, inference = map(load_policy, ("strict", "native", "inference"))
    assert dataclasses.astuple(strict.error) == ("relative_l2", 0.005, "calibrated")
    assert native.recipes.allow == ()
    assert native.tuning.mode == "off"
    assert native.backends.permits("bf16_fallback")
    assert not native.backends.permits("cublas")
    assert inference.gate.min_speedup == 1.2
    assert inference.tuning.budget_ms > load_policy("default").tuning.budget_ms
    assert len({load_policy(name) for name in shipped_policies()}) == 4


def test_the_schemas_defaults_are_those_of_the_default_policy():
    said = tomllib.loads((FOLDER / "default.toml").read_text(encoding="utf-8"))
    assert said == {
        section: {key: SCHEMA["$defs"][section]["properties"][key]["default"] for key in keys}
        for section, keys in KEYS.items()
    }


def test_schema_loader_and_facts_know_the_same_keys():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == {*KEYS, "extends", "rules"}
    assert SCHEMA["properties"]["extends"]["enum"] == list(shipped_policies())
    assert set(SCHEMA["$defs"]["match"]["properties"]) == set(MATCH) == {f.name for f in dataclasses.fields(Match)}
    for section, keys in KEYS.items():
        known = SCHEMA["$defs"][section]["properties"]
        assert set(known) == set(keys) == {f.name for f in dataclasses.fields(SECTIONS[section])}
        assert all(key["description"] for key in known.values())


# What a file may say

BAD = {
    "gate.min_speedups = 2": "gate.min_speedups is unknown; did you mean min_speedup? allowed: min_speedup, ",
    "[gates]": "mine.toml: gates is unknown; did you mean gate? allowed: gate, error",
    "zzz = 1": "mine.toml: zzz is unknown; allowed: gate",
    "gate.min_speedup = true": "gate.min_speedup = True: allowed: a finite number, 0 or more",
    "gate.min_speedup = '2'": "gate.min_speedup = '2': allowed: a finite number",
    "gate = 3": "gate = 3: allowed: a table",
    "error.tolerance = -0.1": "error.tolerance = -0.1: allowed: a finite number",
    "error.metric = 'relative_l3'": "did you mean relative_l2? allowed: similarity_loss, relative_l2, max_abs",
    "error.metric = ['relative_l2']": "allowed: similarity_loss",
    "recipes.allow = ['e4m3:rows']": "granularity 'rows' is unknown; allowed: tensor, row",
    "tolerance = 0.1": "tolerance is unknown; did you mean error.tolerance? allowed: gate, error, ",
    "mode = 'off'": "mode is unknown; did you mean tuning.mode or guard.mode? allowed: ",
    "error.min_speedup = 1": "error.min_speedup is unknown; did you mean gate.min_speedup? allowed: metric, ",
    "recipes.allow = 'e4m3:row'": "allowed: a list",
    "recipes.allow = [1]": "1 is not a scaling recipe",
    "recipes.allow = ['e4m3:row@e4m3:row@e4m3:row']": "not a pair",
    "recipes.inputs = ['bf16']": "did you mean bfloat16?",
    "recipes.accumulation = []": "allowed: a list of at least 1",
    "tuning.mode = 'lock'": "did you mean locked? allowed: measure, off, locked",
    "tuning.memory_mb = true": "tuning.memory_mb = True: allowed: a whole number, 1 or more",
    "tuning.memory_mb = 0": "allowed: a whole number, 1 or more",
    "tuning.memory_mb = 1.5": "allowed: a whole number, 1 or more",
    "guard.mode = 'always'": "guard.mode = 'always': allowed: off, async, strict",
    "guard.probe_every = -1": "guard.probe_every = -1: allowed: a whole number, 0 or more",
    "guard.cool_down_s = -1": "guard.cool_down_s = -1",
    "guard.traced = 'on'": "guard.traced = 'on': allowed: off, callback",
    "backends.allow = ['']": "allowed: a string that is not empty",
    "backends.deny = 'cublas'": "allowed: a list",
    "extends = 'other'": "extends = 'other': allowed: default, inference, native, strict",
    "extends = 1": "extends = 1: allowed",
    "rules = 1": "allowed: tables, each headed [[rules]]",
    "rules = [1]": "rules[0] = 1: allowed: a table",
    "[[rules]]\nerror.tolerance = 1": "rules[0].match is missing or empty",
    "[[rules]]\nmatch = {}\nerror.tolerance = 1": "rules[0].match is missing or empty",
    "[[rules]]\nmatch = 3\nerror.tolerance = 1": "rules[0].match = 3: allowed: a table",
    "[[rules]]\nmatch.m = 3": "rules[0] overrides nothing",
    "[[rules]]\nmatch.m = 3\nerror = {}": "rules[0] overrides nothing",
    "[[rules]]\nmatch.shape = 3\nerror.tolerance = 1": "rules[0].match.shape is unknown; ",
    "[[rules]]\nmatch.m = -3\nerror.tolerance = 1": "rules[0].match.m = -3: allowed: a whole number, 0 or more",
    "[[rules]]\nmatch.m = [1, 2]\nerror.tolerance = 1": "rules[0].match.m = [1, 2]: allowed: a whole number",
    "[[rules]]\nmatch.m = {}\nerror.tolerance = 1": "such as { min = 1, max = 16 }",
    "[[rules]]\nmatch.m.least = 3\nerror.tolerance = 1": "such as { min = 1, max = 16 }",
    "[[rules]]\nmatch.dtype = 'bf*'\nerror.tolerance = 1": "rules[0].match.dtype = 'bf*': ",
    "[[rules]]\nmatch.framework = 'pytorch'\nerror.tolerance = 1": "did you mean torch?",
    "[[rules]]\nmatch.scope = []\nerror.tolerance = 1": "allowed: a list of at least 1",
    "[[rules]]\nmatch.m = 1\n[[rules.rules]]\nmatch.m = 3": "rules[0].rules is unknown",
    "rules = [{ match.m = 1, guard.mode = 'off' }, { match.m = 3, error.metric = 1 }]": "rules[1].error.metric = 1: ",
}
ONLY_LOADER = {  # what JSON Schema cannot say
    "error.tolerance = nan": "error.tolerance = nan: allowed: a finite number",
    "error.tolerance = inf": "error.tolerance = inf: allowed: a finite number",
    f"gate.min_speedup = {'9' * 400}": "allowed: a finite number",
    "tuning.memory_mb = nan": "allowed: a whole number",
    "[[rules]]\nmatch.m = { min = 5, max = 4 }\nerror.tolerance = 1": "allowed: a min that is not above the max",
}


@pytest.mark.parametrize("text", BAD | ONLY_LOADER)
def test_a_bad_file_is_refused_with_file_key_and_what_is_allowed(text, write):
    path = write(text)
    with pytest.raises(PolicyError) as raised:
        load_policy(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert (BAD | ONLY_LOADER)[text] in str(raised.value)


@pytest.mark.parametrize("text", BAD)
def test_the_schema_refuses_it_too(text):
    assert not VALIDATOR.is_valid(tomllib.loads(text))


def test_wrong_toml_names_file_and_line(write):
    path = write("[gate]\nmin_speedup = = 2\n")
    with pytest.raises(PolicyError, match="line 2") as raised:
        load_policy(path)
    assert str(raised.value).startswith(f"{path}: not valid TOML")


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(PolicyError, match="shipped policies: default"):
        load_policy(tmp_path / "none.toml")
    with pytest.raises(PolicyError, match="cannot be read"):
        load_policy(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(PolicyError, match="cannot be read"):
        load_policy(tmp_path / "latin.toml")
    with pytest.raises(PolicyError, match="cannot be read"):
        load_policy("a\0b.toml")


def test_a_file_that_is_nested_beyond_what_python_reads(write):
    path = write(f"gate = {'[' * 5000}{']' * 5000}")
    with pytest.raises(PolicyError, match="nested too deeply") as raised:
        load_policy(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_an_editors_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "marked.toml"
    path.write_bytes(b"\xef\xbb\xbf[gate]\r\nmin_speedup = 1.4\r\n")
    assert load_policy(path).gate.min_speedup == 1.4


WORDS = (
    "bfloat16",
    "float32",
    "e4m3:row",
    "e4m3:1x128@e4m3:128x128",
    "e5m2:1x32:e8m0",
    "e4m3:",
    "random",
    "calibrated",
    "relative_l2",
    "fast",
    "promoted",
    "measure",
    "off",
    "locked",
    "torch",
    "sm9*",
    "",
    "*",
)
NUMBERS = (True, False, -3, 0, 1, 5000, 0.0, 0.5, 2.0, -1.5, 1e9)
PLAIN = (*WORDS, *NUMBERS)
TABLES = ({}, {"min": 1}, {"max": 0}, {"min": 1, "max": 2.0}, {"min": -1}, {"least": 1}, {"min": True}, {"max": "1"})


def agree(data):
    """Check that schema and loader both take `data`, or both refuse it; return which."""
    reason = None
    try:
        _policy._assemble(check(data, "drawn"), "drawn", "drawn")
    except PolicyError as error:
        reason = str(error)
    assert (reason is None) == VALIDATOR.is_valid(data), (data, reason)
    return reason is None


@pytest.mark.parametrize("place", [*(f"{section}.{key}" for section in KEYS for key in KEYS[section]), *MATCH])
def test_schema_and_loader_agree_about_each_value(place):
    section, _, key = place.rpartition(".")
    values = [*PLAIN, [], *([value] for value in PLAIN), ["bfloat16", ""], ["fast", 1], *TABLES, [{}], [[]]]
    verdicts = set()
    for value in values:
        if section:
            verdicts.add(agree({section: {key: value}}))
            agree({"rules": [{"match": {"m": 1}, section: {key: value}}]})
        else:
            verdicts.add(agree({"rules": [{"match": {key: value}, "gate": {"min_speedup": 1}}]}))
    assert verdicts == {True, False}


SCALARS = st.sampled_from(PLAIN)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.sampled_from(TABLES)


def tables(keys):
    return SCALARS | st.dictionaries(st.sampled_from([*keys, "other"]), VALUES, max_size=2)


SECTION_TABLES = {section: tables(keys) for section, keys in KEYS.items()} | {"other": tables(["x"])}
RULES = st.fixed_dictionaries({}, optional={"match": tables(MATCH), **SECTION_TABLES})
FILES = st.fixed_dictionaries(
    {},
    optional={
        **SECTION_TABLES,
        "extends": st.sampled_from(["default", "strict", "other", 1]),
        "rules": st.lists(RULES | SCALARS, max_size=2) | SCALARS,
    },
)


def narrow(draw_from):
    """Files with one section or rule each: whole ones are nearly always wrong somewhere."""
    one = st.sampled_from(sorted(KEYS)).flatmap(lambda s: st.fixed_dictionaries({s: tables(KEYS[s])}))
    rule = st.builds(lambda match, rest: {"rules": [{"match": match, **rest}]}, tables(MATCH), one)
    return draw_from | one | rule


@given(narrow(FILES))
def test_schema_and_loader_agree_about_whole_files(data):
    agree(data)


# Where a policy is found


def test_a_bare_name_is_never_a_file_here(write, tmp_path, monkeypatch):
    for name in ("strict", "strict.toml", "mine"):
        write("gate.min_speedup = 99", name)
    monkeypatch.chdir(tmp_path)
    assert load_policy("strict").gate.min_speedup == 1.5
    with pytest.raises(PolicyError, match=r"no policy is named 'mine'; shipped: default, .* A path has a / or"):
        load_policy("mine")


@pytest.mark.parametrize("spelling", ["./mine", "mine.toml", Path("mine.toml"), Path("mine")])
def test_a_path_is_a_file(spelling, write, tmp_path, monkeypatch):
    for name in ("mine", "mine.toml"):
        write("gate.min_speedup = 99", name)
    monkeypatch.chdir(tmp_path)
    assert load_policy(spelling).gate.min_speedup == 99


def test_a_file_states_what_differs(write):
    path = write("extends = 'strict'\n[error]\ntolerance = 0.01\n[recipes]\nallow = ['e5m2:row', 'e5m2:row']")
    policy = load_policy(path)
    assert dataclasses.astuple(policy.error) == ("relative_l2", 0.01, "calibrated")
    assert policy.recipes.allow == (RecipePair.parse("e5m2:row"),)
    assert policy.gate == load_policy("default").gate
    assert policy.name == policy.origins["error.tolerance"] == str(path)
    assert policy.origins["error.metric"].endswith("strict.toml")
    assert policy.origins["gate.min_speedup"].endswith("default.toml")


def test_an_empty_file_is_the_default(write):
    assert load_policy(write("")) == load_policy("default")


def process(code, **env):
    clean = {k: v for k, v in os.environ.items() if k != "DISPATCH_POLICY"} | env
    script = f"from dispatch.policies.policy import *\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean, check=False)


def test_the_environment_names_the_process_default(write):
    show = "print(current_policy().name, current_policy().gate.min_speedup)"
    path = write("gate.min_speedup = 7")
    assert process(show).stdout.split() == ["default", "1.5"]
    assert process(show, DISPATCH_POLICY="").stdout.split() == ["default", "1.5"]
    assert process(show, DISPATCH_POLICY="inference").stdout.split() == ["inference", "1.2"]
    assert process(show, DISPATCH_POLICY=str(path)).stdout.split() == [str(path), "7.0"]
    wrong = process(show, DISPATCH_POLICY="mine")
    assert wrong.returncode
    assert "PolicyError: DISPATCH_POLICY=mine: no policy is named 'mine'" in wrong.stderr


@pytest.mark.usefixtures("fresh_process_default")
def test_the_environment_is_read_once(monkeypatch):
    monkeypatch.setenv("DISPATCH_POLICY", "strict")
    assert current_policy().name == "strict"
    monkeypatch.setenv("DISPATCH_POLICY", "native")
    assert current_policy().name == "strict"


# Rules

RULES_TEXT = """
[error]
tolerance = 0.5
[[rules]]
match.scope = ["*.lm_head", "*.router"]
error.tolerance = 0.1
gate.min_speedup = 3
[[rules]]
match = { m = { max = 16 }, k = { min = 1024 } }
error.tolerance = 0.2
[[rules]]
match = { dtype = "float32", framework = ["torch", "jax"], arch = "sm9*", n = 64, op = "mat*" }
recipes.inputs = ["float32"]
"""


def test_later_rules_override_earlier_ones_key_by_key(write):
    path = write(RULES_TEXT)
    policy = load_policy(path)
    found = policy.for_problem(problem(m=16), "model.lm_head")
    assert (found.error.tolerance, found.gate.min_speedup) == (0.2, 3)
    assert found.rules == ()
    assert found.name == policy.name
    assert found.origins["error.tolerance"] == f"{path} rules[1]"
    assert found.origins["gate.min_speedup"] == f"{path} rules[0]"
    assert policy.error.tolerance == 0.5
    found = policy.for_problem(problem(m=17), "model.lm_head")
    assert (found.error.tolerance, found.gate.min_speedup) == (0.1, 3)
    assert policy.for_problem(problem(m=17), None).error.tolerance == 0.5
    assert policy.for_problem(problem(m=17), "model.LM_HEAD").error.tolerance == 0.5


def test_every_condition_of_a_rule_must_hold(write):
    policy = load_policy(write(RULES_TEXT))
    fitting = {"a": "float32", "b": "bfloat16", "n": 64}

    def takes_float32(**changes):
        return policy.for_problem(problem(**fitting | changes), None).recipes.inputs == ("float32",)

    assert takes_float32()
    assert takes_float32(a="bfloat16", b="float32", framework="jax", arch="sm90a")
    assert not takes_float32(a="bfloat16")
    assert not takes_float32(framework="numpy")
    assert not takes_float32(arch="sm100")
    assert not takes_float32(n=65)
    grouped = dataclasses.replace(problem(**fitting), op="grouped")
    assert policy.for_problem(grouped, None).recipes.inputs != ("float32",)


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("16", [16], [0, 15, 17]),
        ("{ min = 2, max = 4 }", [2, 3, 4], [1, 5]),
        ("{ min = 3 }", [3, 10**9], [2]),
        ("{ max = 3 }", [0, 3], [4]),
        ("0", [0], [1]),
    ],
)
def test_ranges_include_their_ends(text, inside, outside, write):
    (rule,) = load_policy(write(f"[[rules]]\nmatch.m = {text}\ngate.min_speedup = 2")).rules
    assert all(m in rule.match.m for m in inside)
    assert not any(m in rule.match.m for m in outside)


def test_no_scope_is_an_empty_one(write):
    policy = load_policy(write("[[rules]]\nmatch.scope = '*'\ngate.min_speedup = 2"))
    assert policy.for_problem(problem(), None).gate.min_speedup == 2
    policy = load_policy(write("[[rules]]\nmatch.scope = '?*'\ngate.min_speedup = 2"))
    assert policy.for_problem(problem(), None).gate.min_speedup == 1.5


def test_a_policy_without_rules_is_its_own_answer():
    policy = load_policy("default")
    assert policy.for_problem(problem(), "x") is policy


# Overrides and identity


def test_override_checks_as_a_file_does():
    policy = load_policy("strict")
    found = policy.override(error={"tolerance": 1}, recipes={"allow": [RecipePair.parse("e4m3:row"), "e5m2:row"]})
    assert found.error.tolerance == 1.0
    assert found.error.metric == "relative_l2"
    assert [str(x) for x in found.recipes.allow] == ["e4m3:row", "e5m2:row"]
    assert found.origins["error.tolerance"] == "override"
    assert found.override(gate={}).name == found.name == "strict (overridden)"
    assert policy.error.tolerance == 0.005
    for sections, text in [
        ({"error": {"tolerances": 1}}, "override: error.tolerances is unknown; did you mean tolerance"),
        ({"error": 0.1}, "override: error = 0.1: allowed: a table"),
        ({"errors": {}}, "did you mean error"),
        ({"error": {"tolerance": True}}, "override: error.tolerance = True"),
        ({"extends": "default"}, "extends is for files"),
    ]:
        with pytest.raises(PolicyError, match=text):
            policy.override(**sections)


def test_rules_can_be_added_and_stay_on_top():
    policy = load_policy("default").override(rules=[{"match": {"m": 1}, "gate": {"min_speedup": 2}}])
    policy = policy.override(gate={"min_speedup": 9}, rules=[{"match": {"m": 2}, "gate": {"min_speedup": 3}}])
    assert [policy.for_problem(problem(m=m), None).gate.min_speedup for m in (1, 2, 3)] == [2, 3, 9]


def test_equal_by_what_affects_a_choice_not_by_name(write):
    default = load_policy("default")
    same = load_policy(write("gate.min_speedup = 1.5"))
    assert same == default
    assert hash(same) == hash(default)
    assert same.fingerprint == default.fingerprint
    assert len(default.fingerprint) == 16
    assert same.name != default.name
    assert default != default.fingerprint


CHANGES = {
    "gate": {"min_speedup": 2, "min_speedup_lossless": 2},
    "error": {"metric": "relative_l2", "tolerance": 0.1, "traced": "calibrated"},
    "recipes": {
        "allow": ["e4m3:tensor", "e4m3:row", "e4m3:1x128@e4m3:128x128"],  # the same ones, preferred otherwise
        "inputs": [],
        "accumulation": ["promoted"],
    },
    "tuning": {"mode": "off", "budget_ms": 1, "compile_ms": 1, "memory_mb": 1},
    "guard": {"mode": "strict", "probe_every": 1, "cool_down_s": 1, "traced": "callback"},
    "fallback": {"too_slow": [], "too_wrong": []},
    "backends": {"allow": ["cublas"], "deny": ["cublas"]},
    "rules": [{"match": {"m": 1}, "gate": {"min_speedup": 2}}],
}


def test_every_key_is_in_the_fingerprint():
    default = load_policy("default")
    changed = [default.override(rules=CHANGES["rules"])]
    for section in CHANGES.keys() - {"rules"}:
        assert CHANGES[section].keys() == KEYS[section].keys()
        changed += [default.override(**{section: {key: value}}) for key, value in CHANGES[section].items()]
    assert len({default, *changed}) == len(changed) + 1


def test_every_condition_is_in_the_fingerprint():
    values = {"m": 1, "n": 1, "k": 1, "dtype": "float32", "framework": "jax", "op": "x", "scope": "x", "arch": "x"}
    assert values.keys() == MATCH.keys()
    rules = [{"match": {key: value}, "gate": {"min_speedup": 2}} for key, value in values.items()]
    assert len({load_policy("default").override(rules=[rule]) for rule in rules}) == len(MATCH)


def test_the_choice_fingerprint_leaves_the_guard_out():
    default = load_policy("default")
    rule = {"match": {"m": 1}, "gate": {"min_speedup": 2}}
    assert default.override(guard={"mode": "strict"}).choice_fingerprint == default.choice_fingerprint
    guarded = default.override(rules=[rule | {"guard": {"probe_every": 3}}])
    assert guarded.choice_fingerprint == default.override(rules=[rule]).choice_fingerprint


def test_the_choice_fingerprint_leaves_tuning_out():
    default = load_policy("default")
    rule = {"match": {"m": 1}, "gate": {"min_speedup": 2}}
    with_rule = default.override(rules=[rule])
    assert default.override(tuning={"mode": "locked", "budget_ms": 1}).choice_fingerprint == default.choice_fingerprint
    assert (
        default.override(rules=[rule | {"tuning": {"mode": "off"}}]).choice_fingerprint == with_rule.choice_fingerprint
    )
    assert with_rule.choice_fingerprint != default.choice_fingerprint
    assert default.override(gate={"min_speedup": 2}).choice_fingerprint != default.choice_fingerprint


def test_policies_are_frozen_and_can_be_copied():
    policy = load_policy("default").override(rules=[{"match": {"m": {"min": 3}}, "gate": {"min_speedup": 2}}])
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.name = "other"
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        assert twin == policy
        assert twin.rules[0].match.m == Range(3)
        assert twin.origins == policy.origins
    assert json.loads(json.dumps(policy.to_dict()))["rules"][0]["overrides"] == {"gate.min_speedup": 2}


@pytest.mark.parametrize(
    ("allow", "deny", "name", "yes"),
    [
        (("*",), (), "cublas", True),
        (("*",), ("cu*",), "cublas", False),
        (("triton_*",), (), "cublas", False),
        (("triton_*",), (), "triton_fp8", True),
        ((), (), "cublas", False),
    ],
)
def test_backends_are_permitted_by_globs(allow, deny, name, yes):
    assert Backends(allow, deny).permits(name) is yes


# The policy in force


def test_use_policy_nests_and_leaves_nothing_behind():
    before = current_policy()
    with use_policy("strict") as strict:
        assert current_policy() is strict
        with use_policy(error={"tolerance": 0.1}) as changed:
            assert current_policy() is changed
            assert (changed.error.metric, changed.error.tolerance) == ("relative_l2", 0.1)
            with use_policy("default", gate={"min_speedup": 4}):
                assert current_policy().error.metric == "similarity_loss"
                assert current_policy().gate.min_speedup == 4
        assert current_policy() is strict
        with pytest.raises(KeyError), use_policy("native"):
            raise KeyError
        assert current_policy() is strict
    assert current_policy() is before


def test_use_policy_takes_a_policy_or_a_path(write):
    path = write("gate.min_speedup = 8")
    policy = load_policy(path)
    for given_policy in (path, str(path), policy):
        with use_policy(given_policy):
            assert current_policy() == policy


def test_use_policy_decorates():
    @use_policy(error={"tolerance": 0.25})
    def tolerance(depth):
        assert current_policy().error.tolerance == 0.25
        return tolerance(depth - 1) if depth else current_policy().error.metric

    assert tolerance(3) == "similarity_loss"
    with use_policy("strict"):
        assert tolerance(3) == "relative_l2"
    assert tolerance.__name__ == "tolerance"


def test_one_object_can_be_entered_again():
    context = use_policy("strict")
    with context:
        with context:
            assert current_policy().name == "strict"
        assert current_policy().name == "strict"
    assert current_policy().name != "strict"


def test_use_policy_refuses_to_decorate_what_runs_later():
    async def coroutine():
        """Do nothing."""

    def generator():
        yield

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="whose body runs later"):
            use_policy("strict")(function)


@pytest.mark.parametrize(
    ("arguments", "sections"),
    [
        (("typo",), {}),
        ((), {"error": {"tolerance": -1}}),
        ((), {"typo": {}}),
        (("strict",), {"gate": 3}),
    ],
)
def test_use_policy_refuses_at_once(arguments, sections):
    with pytest.raises(PolicyError):
        use_policy(*arguments, **sections)


def test_threads_do_not_see_each_others_policy():
    seen, barrier = {}, threading.Barrier(4)

    def work(name):
        with use_policy(name):
            barrier.wait(30)
            seen[name] = current_policy().name
            barrier.wait(30)

    with use_policy(gate={"min_speedup": 77}):
        threads = [threading.Thread(target=work, args=(name,)) for name in shipped_policies()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current_policy().gate.min_speedup == 77
    assert seen == {name: name for name in shipped_policies()}


def test_tasks_do_not_see_each_others_policy():
    async def work(name):
        with use_policy(name):
            await asyncio.sleep(0)
            first = current_policy().name
            await asyncio.sleep(0)
            return first, current_policy().name

    async def main():
        found = await asyncio.gather(*(work(name) for name in shipped_policies()))
        return found, current_policy()

    before = current_policy()
    assert asyncio.run(main()) == ([(name, name) for name in shipped_policies()], before)


def test_frameworks_enter_their_contexts_too(monkeypatch):
    events = []

    @contextlib.contextmanager
    def context(policy):
        events.append(("in", policy.name, current_policy().name))
        yield
        events.append(("out", policy.name, current_policy().name))

    monkeypatch.setattr(_policy, "_policy_contexts", [context])
    with use_policy("strict"):
        assert events == [("in", "strict", "strict")]
    assert events[1:] == [("out", "strict", "strict")]


def test_a_context_that_fails_leaves_the_policy_as_it_was(monkeypatch):
    def fails(_policy: Policy):
        raise RuntimeError("no")

    left = []
    good = contextlib.contextmanager(lambda policy: (yield left.append(policy)))
    monkeypatch.setattr(_policy, "_policy_contexts", [good, fails])
    before = current_policy()
    with pytest.raises(RuntimeError, match="no"), use_policy("strict"):
        pytest.fail("entered")
    assert current_policy() is before
    assert len(left) == 1
