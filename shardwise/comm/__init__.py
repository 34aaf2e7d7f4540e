"""this package is everything that passes between ranks: worlds, the door, transports, the ledger."""
