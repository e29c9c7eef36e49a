"""A skipped step in a file: written by `BlackBox`, and run again by `load_capsule`."""
