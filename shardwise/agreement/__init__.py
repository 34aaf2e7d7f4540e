"""What ranks must have alike: sums of bits, doubts, and their exchange."""
