"""LoRA adapters as GGUF files."""
