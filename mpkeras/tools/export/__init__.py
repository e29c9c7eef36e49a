"""`convert`: the file of a model in, one under another policy out."""
