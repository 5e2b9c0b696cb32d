"""Backends: one module each, named as its entry point; see dispatch.Backend."""
