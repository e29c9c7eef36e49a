"""`python -m mpkeras demo`: two tasks on real data, trained under each policy and compared."""
