"""Other systems' configurations, read as a plan and a configuration of `shardwise train`."""
