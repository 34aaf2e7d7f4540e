"""How the ranks of a plan hold each parameter, and the arithmetic of uneven shards."""
