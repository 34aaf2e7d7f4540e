"""What a run measures of itself: metrics, timelines, memory, experts."""
