"""What is remembered between processes: the decision store, and facts as JSON."""

from dispatch.remembering.codec import from_plain, to_plain
from dispatch.remembering.decisions import FORMAT, Decisions, keys_of
from dispatch.remembering.known import KnownCalls
from dispatch.remembering.store import DecisionStore, StoreWarning, key_of

__all__ = [
    "FORMAT",
    "DecisionStore",
    "Decisions",
    "KnownCalls",
    "StoreWarning",
    "from_plain",
    "key_of",
    "keys_of",
    "to_plain",
]
