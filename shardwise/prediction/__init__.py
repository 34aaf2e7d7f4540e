"""What a plan will send and hold, from formulas alone: it reads core, not torch."""
