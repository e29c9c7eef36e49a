"""Makes the layers of a model obey a policy, and takes it back."""
