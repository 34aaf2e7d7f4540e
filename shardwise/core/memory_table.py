"""The table of memory: what a rank's bytes are, by category, and who stores them.

category      what it is                                           stored
parameters    weights, full or this rank's block                   between steps
gradients     of trained parameters                                between steps
optimizer     masters and states                                   between steps
buffers       of the model; of communication; arenas; of a disk    between steps
"""

CATEGORIES = ("parameters", "gradients", "optimizer", "buffers")
