"""What the operators share."""
