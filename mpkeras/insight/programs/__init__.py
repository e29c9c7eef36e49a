"""The program that a backend makes of a model's forward pass: its products and casts, each with the layer it is of."""
