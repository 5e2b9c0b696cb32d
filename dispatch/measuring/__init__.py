"""The policy engine's instruments: latency and error."""
