"""The proofs: what each part of Shardwise must do, on worlds of one, threads and processes."""
