"""Users of the public functions: the demonstration and its kin."""
