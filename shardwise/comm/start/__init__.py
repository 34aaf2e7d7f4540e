"""How the ranks of a run start, meet, watch each other, and end."""
