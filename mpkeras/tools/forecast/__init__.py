"""`forecast`: what an accelerator that need not be there would give a model."""
