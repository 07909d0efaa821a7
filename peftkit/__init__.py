"""peftkit: parameter-efficient fine-tuning of transformers, by roles."""
