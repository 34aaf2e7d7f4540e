"""How the arithmetic of one layer is done on this device; optional, and known to nobody else."""
