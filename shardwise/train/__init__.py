"""The trainer: from a TOML file and a world to a trained model and its report."""
