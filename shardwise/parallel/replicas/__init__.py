"""Replicas in threads: the four operations of `sw.DataParallel`, each differentiable."""
