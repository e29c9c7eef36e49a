"""The ground of several tools: reports, observations of a pass through a model, and the batches of skipped steps."""
