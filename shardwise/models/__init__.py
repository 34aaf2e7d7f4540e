"""This file is the front of `models/`: a GPT written once, and doors to other people's models."""
