"""What a model and an engine do: recorded passes of a plain model, meters, timelines."""
