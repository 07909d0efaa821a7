"""What a model is trained to do: rows, batches, loss and metric of one task each."""
