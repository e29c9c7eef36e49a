"""The documented place of `convert`, which `mpkeras.tools.export` holds."""
