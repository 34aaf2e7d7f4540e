"""Pipeline schedules as values: what each rank does in which order, and what follows."""
