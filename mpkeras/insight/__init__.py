"""Seeing what a model and a machine do in mixed precision: reports for people and for programs."""
