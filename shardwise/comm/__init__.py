"""this package is what passes between ranks: worlds, the door, transports, the ledger."""
