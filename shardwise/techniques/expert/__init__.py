"""Mixture of experts: gates, dispatch, experts and their parallelism."""
