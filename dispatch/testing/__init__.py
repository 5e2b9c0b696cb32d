"""What plugin authors use: problems from a capability, conformance checks, fakes."""
