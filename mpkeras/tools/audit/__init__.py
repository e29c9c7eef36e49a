"""`audit`: what each layer of a model computes in, and what looks wrong."""
