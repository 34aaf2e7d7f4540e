"""`shardwise doctor`: what the machines are, whether their collectives are right, how fast."""
