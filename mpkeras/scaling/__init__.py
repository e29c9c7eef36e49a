"""What moves the loss scale: the optimizer around the user's, its window, and the facts of a step."""
