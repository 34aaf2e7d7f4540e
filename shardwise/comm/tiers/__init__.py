"""Where tensors rest besides the device: host memory, a disk, and arenas."""
