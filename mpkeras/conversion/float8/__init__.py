"""Products in float8: which layers have them, the `call` that computes them, and the rounding of operands."""
