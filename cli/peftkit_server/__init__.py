"""An HTTP server for adapters with OpenAI's API, for development on one machine."""
