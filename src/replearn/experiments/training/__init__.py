"""The trainer of the recipes; it uses the library's public functions alone."""
