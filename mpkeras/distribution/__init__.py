"""What an optimizer owes to several devices: one decision, and gradients summed once."""
