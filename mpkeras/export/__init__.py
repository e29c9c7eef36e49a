"""Files: a saved model converted to the dtypes of a policy, saved again or exported."""
