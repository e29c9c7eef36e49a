"""The parts of `gpu_training.py`: what is trained, in which variants, by which processes, and what is said of it."""
