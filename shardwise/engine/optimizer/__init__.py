"""The optimizer over shards: its specification, its states, and the update of a step."""
