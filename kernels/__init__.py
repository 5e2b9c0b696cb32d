"""Device code and the naive reference: arrays in, arrays out, no choosing."""
