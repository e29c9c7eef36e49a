"""The range of every layer: `trace_numerics`, and the callbacks that act on what it shows."""
