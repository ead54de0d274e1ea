"""Our own trainer: the first user of the library, with no private entrance to it."""
