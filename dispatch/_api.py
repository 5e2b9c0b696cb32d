"""The public functions, and the table of known calls behind them."""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from dispatch._backend import Plan
from dispatch._decision import Decision, decide
from dispatch._engine import Engine, Resolved
from dispatch._measurement import FRAMEWORKS_OWN
from dispatch.frameworks.calls import KEYS, ROOMS, Options, call_key, policy_of, recognize
from dispatch.frameworks.compiled import NOT_OURS, interpreted, traced
from dispatch.frameworks.operands import array_of
from dispatch.frameworks.request import Request, check_alive, describe, is_callers, own_product, refused, request
from dispatch.policies.policy import Policy, _in_force
from dispatch.quantization import PreparedOperand, ScaledArray
from dispatch.registry import BackendInfo, Registry, status
from dispatch.registry.faults import is_out_of_memory
from dispatch.remembering import DecisionStore, KnownCalls

_table = KnownCalls()
_young = _table.young
_served = _table.served
_active = _in_force.get
_engine: Engine | None = None


def matmul(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    backend: str | None = None,
    scope: str | None = None,
) -> Any:
    """Return activation(a @ b + bias) by the fastest route that is accurate enough.

    a, b: arrays of one framework (NumPy, torch, JAX) on one device, ScaledArrays or prepared operands; shapes as the
    array API's matmul has them: vectors, matrices, and stacks whose leading dimensions broadcast; any strides, zero
    sizes too. bias: an array that broadcasts to the result. activation: relu, gelu, gelu_tanh or silu, in float32
    after the bias; torch's own is of what its linear layer rounds to. out_dtype: the result's; by default the
    framework's own promotion, and bfloat16 for two FP8 operands. policy: a name, path or Policy for this call. backend:
    use this one or raise NoBackendError. scope: a name for where in a model the product stands; rules may match it.

    A problem that is not known is measured within the policy's budget; explain() says what came of it. Raises
    MixedArraysError (a TypeError) for arrays of two frameworks or devices, and whatever the framework's own
    matmul raises.
    """
    plain = bias is activation is out_dtype is policy is backend is scope is None and type(b) is not ScaledArray
    if plain and (key_of := KEYS.get(type(a))) is not None:
        key = key_of(a, b, _active()) if type(b) is not PreparedOperand else key_of(a, b._array, (_active(),))
        plan = _young.get(key)
    else:
        key, plan = _known(a, b, bias, activation, out_dtype, policy, backend, scope)
    if plan is not None:
        try:
            return plan(a, b) if bias is None else plan(a, b, bias)
        except BaseException as error:  # a plugin's code may raise anything
            _blame(request(a, b, bias, activation, out_dtype), key, plan, error)
    return _call(request(a, b, bias, activation, out_dtype), _options(policy, backend, scope))


matmul._torchdynamo_inline = traced  # type: ignore[attr-defined]


def explain(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    policy: Policy | str | os.PathLike[str] | None = None,
    backend: str | None = None,
    scope: str | None = None,
) -> Decision:
    """Return the Decision for a call of matmul with the same arguments; print() of it is a table.

    Measures if the problem is not known yet. Raises what matmul raises; for shapes or dtypes that the framework's own
    matmul refuses, its error; TypeError for what that multiplies by a rule of its own, as torch's nested tensors.
    """
    call, options = request(a, b, bias, activation, out_dtype), _options(policy, backend, scope)
    problem = describe(call.room.chosen(call))
    if problem is None:
        refused(call)
        raise TypeError(f"{call.room.name} multiplies these by a rule of its own: there is nothing to choose")
    if _key(call, options) is None:
        return replace(decide(problem, {}, {}, options.policy), reason=f"the framework's own product: {NOT_OURS}")
    return engine().decision(call, problem, options)[0]


def _call(call: Request, options: Options) -> Any:
    """Serve a call that the table did not."""
    if (product := call.room.deferred(call, options)) is not None:
        return product
    key = _key(call, options)
    if key is None:
        return interpreted(call, options.policy if options.named else None, options.backend, options.scope)
    plan = _young.get(key) or _table.find(key)
    if plan is not None:
        recognize(call)
    while True:
        backend = _served.get(key)
        if plan is None:
            resolved = engine().resolve(call, options)
            if resolved is None:
                return refused(call)
            plan, backend = resolved.plan, resolved.decision.backend
            if resolved.keep:
                _remember(key, call, resolved)
        try:
            return plan(*call.operands)
        except BaseException as error:  # a plugin's code may raise anything
            if backend in FRAMEWORKS_OWN or is_callers(call, plan, error):
                raise
            plan = None
            if backend is None:  # a known call: resolving says whose it is
                continue
            if is_out_of_memory(error):
                return own_product(call)(*call.operands)
            _failed(call, backend, error)


def _key(call: Request, options: Options) -> Hashable | None:
    """Return the key of a call, or None where something else interprets it."""
    facts = call.a, call.b, call.bias, call.activation, call.out_dtype
    return call_key(call.room, *facts, options.policy, options.backend, options.scope, call.op)


def _known(a: Any, b: Any, bias: Any, *rest: Any) -> tuple[Hashable, Plan | None]:
    """Return the key of a call of matmul and its plan; no plan for what has to be looked at first."""
    room = ROOMS.get(type(a)) or ROOMS.get(type(array_of(a)))
    if room is None or not (bias is None or type(bias) in ROOMS):
        return None, None
    try:
        key = call_key(room, a, b, bias, *rest)
        return key, None if key is None else _young.get(key)
    except (TypeError, AttributeError):  # what is no array, or has no hash
        return None, None


def _remember(key: Hashable, call: Request, resolved: Resolved) -> None:
    backend = resolved.decision.backend
    _table.keep(key, resolved.plan, None if backend in FRAMEWORKS_OWN else backend)
    recognize(call)


def _blame(call: Request, key: Hashable, plan: Plan, error: BaseException) -> None:
    """Raise what a known plan raised if it is the caller's own; else quarantine the backend that serves by it."""
    if is_callers(call, plan, error):
        raise error
    if (served := _served.get(key)) is not None:
        _failed(call, served, error)


def _failed(call: Request, backend: str, error: BaseException) -> None:
    """Quarantine the backend that raised and forget every plan; out of memory is no fault."""
    if is_out_of_memory(error):
        return
    engine().condemn(backend, error)
    forget()
    check_alive(call, backend, error)


def _options(policy: Policy | str | os.PathLike[str] | None, backend: str | None, scope: str | None) -> Options:
    return Options(policy_of(policy), backend, scope, policy is not None)


def forget() -> None:
    """Forget every known call in this process; the decision store stays."""
    _table.clear()


def engine() -> Engine:
    """Return the process's engine, made at first use."""
    global _engine
    if _engine is None:
        _engine = Engine(Registry(), DecisionStore(), forget)
    return _engine


def backends() -> list[BackendInfo]:
    """Return every backend in the stable order, with why not where it cannot work here, and what failed to load."""
    return status(engine().registry, engine().quarantine)


def stats() -> dict[str, Any]:
    """Return counts of this process: problems measured and remembered, plans known, faults, and the store's state."""
    own = engine()
    return {
        "measured": own.counts["measured"],
        "remembered": own.counts["remembered"],
        "plans": len(_table),
        "guard": dict(own.guard.counts),
        "quarantined": dict(own.quarantine),
        "faults": [f"{fault.name} of {fault.distribution}: {fault.reason}" for fault in own.registry.faults],
        "store": {"path": str(own.decisions.store.path), "state": own.decisions.store.state},
    }


def register(plugin: Any, *, distribution: str = "caller") -> None:
    """Register a Backend, or a module or object with hook implementations, in this process.

    For notebooks and tests; a package declares an entry point in the group `dispatch.backends` instead. Registered
    again, it takes the place of what it was, quarantine and all.
    """
    name = str(getattr(plugin, "name", None) or getattr(plugin, "__name__", type(plugin).__name__))
    engine().registry.add(plugin, name, distribution)
    engine().quarantine.pop(name, None)
    forget()


def unregister(name: str, *, distribution: str = "caller") -> None:
    """Take out what `register` put in under that name, and forget its quarantine. Raises ValueError without it."""
    if not engine().registry.remove(name, distribution):
        raise ValueError(f"{distribution} has registered nothing under the name {name!r}")
    engine().quarantine.pop(name, None)
    forget()


def stored() -> list[Decision]:
    """Return the decisions in the store; records that this version cannot read are left out."""
    return engine().decisions.stored()


def clear_store() -> int:
    """Forget every decision, in this process and in the store; return how many the store held."""
    forget()
    return engine().clear()
