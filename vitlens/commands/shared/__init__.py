"""What several commands show or judge by one rule: rows, claims and sections."""
