"""Checks of arguments, of ranks that must agree, and of the room on the device."""
