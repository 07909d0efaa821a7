"""The `peftkit` command: argv in, one call into `peftkit`, a screen out."""
