"""The documented places of what public functions return; the classes are in `mpkeras.tools`."""
