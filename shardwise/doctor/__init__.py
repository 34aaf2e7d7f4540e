"""`shardwise doctor`: describes the machines, checks their collectives, measures their links."""
