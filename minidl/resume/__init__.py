"""The state of a loader: how far its consumer is, and how another one goes on from there."""
