"""A run as one file for llama.cpp, Ollama and LM Studio."""
