"""Communication between ranks: worlds, moves, transports, the ledger."""
