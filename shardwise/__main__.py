"""`python -m shardwise` is the command `shardwise`."""

from shardwise.train.cli import main

if __name__ == "__main__":
    main()
