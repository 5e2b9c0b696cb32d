"""The public functions, and the table of known calls behind them."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from dispatch._decision import Decision, decide
from dispatch._engine import Engine, Options, Resolved
from dispatch.frameworks._tracing import policy_context
from dispatch.frameworks.operands import array_of
from dispatch.frameworks.request import Request, describe, own_product, refused, request
from dispatch.measuring.session import is_out_of_memory
from dispatch.policies.policy import Policy, _in_force, _policy_contexts, current_policy, load_policy
from dispatch.quantization import PreparedOperand, ScaledArray
from dispatch.registry import BackendInfo, Registry, status
from dispatch.remembering import DecisionStore, KnownCalls, from_plain

FRAMEWORKS_OWN = ("baseline", "bf16_fallback")  # what they raise is the framework's own error
_table = KnownCalls()
_young = _table.young
_served: dict[Hashable, str] = {}
"""The backend of every known call that a plugin serves."""
_keys: dict[type, Callable[[Any, Any, Hashable], Hashable | None]] = {}
_active = _in_force.get
_policy_contexts.append(policy_context)
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
    after the bias. out_dtype: the result's; by default the framework's own promotion, and bfloat16 for two FP8
    operands. policy: a name, path or Policy for this call. backend: use this one or raise NoBackendError. scope: a
    name for where in a model the product stands; rules may match it.

    A problem that is not known is measured within the policy's budget; explain() says what came of it. Raises
    MixedArraysError (a TypeError) for arrays of two frameworks or devices, and whatever the framework's own
    matmul raises.
    """
    if bias is activation is out_dtype is policy is backend is scope is None:
        key_of = _keys.get(type(a))
        if key_of is not None:
            key = key_of(a, b, _active())
            plan = _young.get(key)
            if plan is not None:
                try:
                    return plan(a, b)
                except BaseException as error:  # a plugin's code may raise anything
                    if key not in _served:
                        raise
                    _failed(key, error)
    return _call(request(a, b, bias, activation, out_dtype), _options(policy, backend, scope))


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
    matmul refuses, its error.
    """
    call, options = request(a, b, bias, activation, out_dtype), _options(policy, backend, scope)
    problem = describe(call)
    if problem is None:
        refused(call)
        raise TypeError(f"{call.room.name} multiplies these by a rule of its own: there is nothing to choose")
    if _key(call, options) is None:
        rule = "the call belongs to a transform, a compiler or a subclass"
        return replace(decide(problem, {}, {}, options.policy), reason=f"the framework's own product: {rule}")
    return engine().decision(call, problem, options)[0]


def _call(call: Request, options: Options) -> Any:
    """Serve a call that the table did not."""
    key = _key(call, options)
    if key is None:
        return own_product(call)(*call.operands)
    plan = _young.get(key) or _table.find(key)
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
            if backend is None or backend in FRAMEWORKS_OWN:
                raise
            if is_out_of_memory(error):
                plan = own_product(call)
            else:
                _failed(key, error, backend)
                _check_alive(call, backend, error)
                plan = None


def _key(call: Request, options: Options) -> Hashable | None:
    """Return the key of a call, or None where something else interprets it."""
    own = call.room.key(array_of(call.a), array_of(call.b), _active())
    bias = () if call.bias is None else call.room.key(call.bias, call.bias)
    if own is None or bias is None:
        return None
    plain = call.plain and call.bias is None and call.activation is None and call.out_dtype is None
    if plain and options.backend is None and options.scope is None and options.policy is current_policy():
        return own
    facts = tuple(_facts(x) for x in (call.a, call.b))
    return own, facts, bias, call.activation, call.out_dtype, options.backend, options.scope, options.policy


def _facts(operand: Any) -> Hashable:
    if isinstance(operand, ScaledArray):
        return operand.recipe, operand.axis, operand.dtype
    return isinstance(operand, PreparedOperand)


def _remember(key: Hashable, call: Request, resolved: Resolved) -> None:
    _table.keep(key, resolved.plan)
    if resolved.decision.backend not in FRAMEWORKS_OWN:
        _served[key] = resolved.decision.backend
    kind = type(call.a)
    if kind not in _keys and call.plain:
        _keys[kind] = call.room.key


def _failed(key: Hashable, error: BaseException, backend: str | None = None) -> None:
    """Quarantine the backend that raised and forget every plan; out of memory is no fault."""
    engine().condemn(backend or _served[key], error)
    forget()


def _check_alive(call: Request, backend: str, error: BaseException) -> None:
    try:
        call.room.synchronize(array_of(call.a))
    except Exception as lost:
        raise RuntimeError(
            f"backend {backend!r} failed ({error}) and left the device unusable ({lost}): nothing in this process can "
            f"use it any more. Restart, with [backends] deny = [{backend!r}] in the policy"
        ) from error


def _options(policy: Policy | str | os.PathLike[str] | None, backend: str | None, scope: str | None) -> Options:
    if policy is None:
        return Options(current_policy(), backend, scope)
    return Options(policy if isinstance(policy, Policy) else load_policy(policy), backend, scope)


def forget() -> None:
    """Forget every known call in this process; the decision store stays."""
    _table.clear()
    _served.clear()


def engine() -> Engine:
    """Return the process's engine, made at first use."""
    global _engine
    if _engine is None:
        _engine = Engine(Registry(), DecisionStore(), matmul)
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
        "quarantined": dict(own.quarantine),
        "faults": [f"{fault.name} of {fault.distribution}: {fault.reason}" for fault in own.registry.faults],
        "store": {"path": str(own.store.path), "state": own.store.state},
    }


def register(plugin: Any, *, distribution: str = "caller") -> None:
    """Register a Backend, or a module or object with hook implementations, in this process.

    For notebooks and tests; a package declares an entry point in the group `dispatch.backends` instead.
    """
    name = str(getattr(plugin, "name", None) or getattr(plugin, "__name__", type(plugin).__name__))
    engine().registry.add(plugin, name, distribution)
    forget()


def unregister(name: str, *, distribution: str = "caller") -> None:
    """Take out what `register` put in under that name, and forget its quarantine."""
    engine().registry.remove(name, distribution)
    engine().quarantine.pop(name, None)
    forget()


def stored() -> list[Decision]:
    """Return the decisions in the store; records that this version cannot read are left out."""
    found = []
    for _, record in engine().store.entries():
        try:
            found.append(from_plain(Decision, record["decision"]))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def clear_store() -> int:
    """Forget every decision, in this process and in the store; return how many the store held."""
    forget()
    return engine().clear()
