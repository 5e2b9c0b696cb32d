"""Layers of other libraries whose products are dispatched: users of the public functions alone."""
