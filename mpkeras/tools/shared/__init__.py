"""What several tools stand on: reports, what is seen of a pass through a model, and the batches of skipped steps."""
