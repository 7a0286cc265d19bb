"""What a user types: one folder a command, from its options to its report."""
