"""What passes between ranks: worlds, the door, transports, the ledger."""
