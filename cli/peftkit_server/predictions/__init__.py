"""A server for an adapter that embeds, ranks or classifies texts."""
