"""What happened: the bounded history, the ledger, and their forms for a person to read."""
