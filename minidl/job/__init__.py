"""A job: the ranks of one training, read as one thing. Which rank keeps the others waiting, since when, and why."""
