"""What a trained adapter is used for: metrics, samples, predictions, new training rows."""
