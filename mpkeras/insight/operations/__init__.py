"""Which operation of a step is the first that is not finite: the step is run op by op, and each result looked at."""
