"""The version of mpkeras, in the one place that `setup.cfg` and `mpkeras.__version__` read."""

__version__ = "0.2.0"
