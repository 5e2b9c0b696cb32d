"""Matrix products by the fastest route that is accurate enough, and the reason why."""

from importlib.util import find_spec

if find_spec("dispatch.policies") is None:
    raise ImportError(f"{__path__[0]} is the source folder alone: run Python elsewhere, or `pip install -e .` there")

from dispatch._api import backends, clear_store, explain, forget, matmul, register, stats, stored, unregister
from dispatch._backend import Backend, Capability, Plan, Rejection, closest
from dispatch._decision import Decision, Verdict, decide
from dispatch._errors import MixedArraysError, NoBackendError, NotLockedError, UnsupportedDtypeError
from dispatch._explain import rows as table_rows
from dispatch._measurement import BASELINE, Candidate, Error, Measurement
from dispatch._problem import ACTIVATIONS, FP8_DTYPES, Operand, Problem
from dispatch._recipe import FORMATS, RecipePair, ScalingRecipe
from dispatch.frameworks import framework, framework_of, installed, machine
from dispatch.frameworks.arch import Arch
from dispatch.frameworks.operands import native
from dispatch.measuring.calibration import calibrate
from dispatch.measuring.watch import Watch, watch
from dispatch.policies.policy import Policy, PolicyError, current_policy, load_policy, use_policy
from dispatch.quantization import PreparedOperand, ScaledArray, prepare, quantize
from dispatch.registry import BackendInfo, PluginWarning, hookimpl
from dispatch.remembering import StoreWarning

__version__ = "0.1.0"

__all__ = [
    "ACTIVATIONS",
    "BASELINE",
    "FORMATS",
    "FP8_DTYPES",
    "Arch",
    "Backend",
    "BackendInfo",
    "Candidate",
    "Capability",
    "Decision",
    "Error",
    "Measurement",
    "MixedArraysError",
    "NoBackendError",
    "NotLockedError",
    "Operand",
    "Plan",
    "PluginWarning",
    "Policy",
    "PolicyError",
    "PreparedOperand",
    "Problem",
    "RecipePair",
    "Rejection",
    "ScaledArray",
    "ScalingRecipe",
    "StoreWarning",
    "UnsupportedDtypeError",
    "Verdict",
    "Watch",
    "__version__",
    "backends",
    "calibrate",
    "clear_store",
    "closest",
    "current_policy",
    "decide",
    "explain",
    "forget",
    "framework",
    "framework_of",
    "hookimpl",
    "installed",
    "load_policy",
    "machine",
    "matmul",
    "native",
    "prepare",
    "quantize",
    "register",
    "stats",
    "stored",
    "table_rows",
    "unregister",
    "use_policy",
    "watch",
]
