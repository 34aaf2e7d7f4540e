"""Tables of tensor parallelism, derived from one pass of the plain model on the meta device."""
