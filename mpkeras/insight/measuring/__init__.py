"""Step times and memory of one model in several settings, the model left as it was."""
