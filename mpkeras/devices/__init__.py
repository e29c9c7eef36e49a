"""What a machine is, and what it computes natively."""
