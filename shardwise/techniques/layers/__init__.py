"""Redistribution of activations between layers whose batch is split over different ranks."""
