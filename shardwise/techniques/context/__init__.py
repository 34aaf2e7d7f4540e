"""Context parallelism: positions of a sequence on different ranks attend to each other."""
