"""Pipeline schedules: the order of actions on each rank, and the times and memory that follow."""
