"""One technique on its own, in a plain PyTorch loop: `sw.DDP`, `sw.FSDP`, `sw.Pipe`."""
