"""The search for the plan with the shortest step: imports core and prediction, not torch."""
